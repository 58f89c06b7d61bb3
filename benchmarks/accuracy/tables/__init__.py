"""One module per data file: its rows, and how a row is predicted and compared."""
