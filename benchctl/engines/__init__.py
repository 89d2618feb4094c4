"""What differs between kinds of server software, one file each; ``kinds`` finds the file of a kind."""
