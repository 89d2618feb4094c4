"""The report page: what one self-contained HTML file shows of a result directory."""
