from pdmesh_proxy.service import main

raise SystemExit(main())
