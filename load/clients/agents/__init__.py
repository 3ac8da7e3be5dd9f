"""One script for each client that agents are written with, unmodified: a stream, a tool that is called, a schema that
is filled. They run in an environment of their own (locks/clients.txt) and print one JSON object."""
