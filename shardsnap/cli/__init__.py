"""The command line; needs the packages of ``shardsnap[cli]``."""
