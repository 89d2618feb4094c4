"""Results of benchctl in the files of other load generators."""
