"""Files of an output folder: layout, case folders, tables, crosswalk, failures."""
