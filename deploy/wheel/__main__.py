"""`python -m fulcrum_serving`."""

from fulcrum_serving import main

main()
