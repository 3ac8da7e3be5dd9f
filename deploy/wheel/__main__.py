from fulcrum_serving import main

main()
