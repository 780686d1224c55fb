from gerl.commandline import signals
from gerl.commandline.command import start

signals.exit_with(start("gerl.verify.command"))
