from pdmesh_decode.main import main

raise SystemExit(main())
