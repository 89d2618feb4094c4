"""What the records mean: metrics, statistics, reconciliation and comparison, as pure functions over records."""
