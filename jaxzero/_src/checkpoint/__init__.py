"""Save, restore and export, for any number of devices."""
