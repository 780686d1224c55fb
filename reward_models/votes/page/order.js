// Functions without a page: ranks from an order, and the number of columns that shows images largest.

/** Ranks [count] from the order of some images, the best first; the others share the last rank. */
export function ranksOf(order, count) {
  const ranks = new Array(count).fill(Math.min(order.length + 1, count));
  order.forEach((image, place) => { ranks[image] = place + 1; });
  return ranks;
}

/** Columns and width of `count` images, of which height / width is `ratio`, in a space: the largest at which all fit. */
export function layout(count, ratio, width, height, gap, least) {
  let best = {columns: 1, size: 0};
  for (let columns = 1; columns <= count; columns++) {
    const rows = Math.ceil(count / columns);
    const size = Math.min((width - gap * (columns - 1)) / columns, (height - gap * (rows - 1)) / rows / ratio);
    if (size > best.size) best = {columns, size};
  }
  if (best.size >= least) return {...best, scroll: false};
  const columns = Math.max(1, Math.min(count, Math.floor((width + gap) / (least + gap))));
  return {columns, size: (width - gap * (columns - 1)) / columns, scroll: true};
}
