"""One module per command of the command line that runs an engine in this process."""
