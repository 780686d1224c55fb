from gerl.commandline import signals
from gerl.evaluate.command import main

signals.exit_with(main())
