"""The cost of guidance code in a step that is not guided, and of its timers in one that is."""
