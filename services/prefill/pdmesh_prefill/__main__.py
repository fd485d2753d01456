from pdmesh_prefill.main import main

raise SystemExit(main())
