"""Less common algorithms from research papers, one file each as in `gerl.algorithms`."""
