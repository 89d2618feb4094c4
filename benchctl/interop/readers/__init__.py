"""Result files and logs of other tools, read into benchctl's names and units."""
