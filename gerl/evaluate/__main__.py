import sys

from gerl.evaluate.command import main

sys.exit(main())
