"""`python -m gerl.watch [run=FOLDER] [key=value ...]`: watch runs in a browser."""

from gerl.commandline import signals
from gerl.commandline.command import start

if __name__ == "__main__":
    signals.exit_with(start("gerl.web.watch"))
