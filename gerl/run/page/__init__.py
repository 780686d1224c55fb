"""The data of the page that shows a run: for `gerl watch`, and for the report, which has them in its file."""
