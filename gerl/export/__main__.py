import sys

from gerl.export.command import main

sys.exit(main())
