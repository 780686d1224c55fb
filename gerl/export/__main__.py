from gerl.export.command import main

raise SystemExit(main())
