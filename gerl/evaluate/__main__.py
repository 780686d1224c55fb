from gerl.evaluate.command import main

raise SystemExit(main())
