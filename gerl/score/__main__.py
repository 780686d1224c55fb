from gerl.score.command import main

raise SystemExit(main())
