from gerl.preflight.command import main

raise SystemExit(main())
