"""The command line: one thin file a command, loaded when it is called. No logic lives here."""
