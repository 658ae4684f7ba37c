"""How a command ends early."""


class CommandError(Exception):
    """A command cannot go on: the message is shown as it is, without a traceback of the command line itself.

    Attributes:
        status: exit status; 2 for what the caller can put right, as for a bad option.
    """

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status
