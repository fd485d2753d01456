from pdmesh.cli import main

main()
