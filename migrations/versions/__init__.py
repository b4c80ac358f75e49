"""The revisions, one file each, named by number and purpose."""
