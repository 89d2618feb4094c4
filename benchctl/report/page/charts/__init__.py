"""The interactive charts of the report page, each a Plotly figure as plain data with its words."""
