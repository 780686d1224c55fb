import sys

from gerl.score.command import main

sys.exit(main())
