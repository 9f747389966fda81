"""One file a stage; plain functions that read and write the run directory."""
