"""Tables and plots: numbers made elsewhere, drawn for a terminal, a file or a paper."""
