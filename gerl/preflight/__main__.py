import sys

from gerl.preflight.command import main

sys.exit(main())
