//! Naive: all ranks send to rank 0, which reduces and sends the result back. Rank 0 moves N−1 times the
//! elements in each direction. Baidu compares its ring with this one.

use super::builder::Builder;

pub(super) fn all_reduce(builder: &mut Builder) {
    let whole = 0..builder.elements;
    if builder.rank > 0 {
        builder.send_chunks(0, whole.clone());
        return builder.receive_chunks(0, whole);
    }
    let others: Vec<usize> = (1..builder.ranks).collect();
    for chunk in builder.chunks(whole) {
        builder.reduce_chunks(&others, chunk.clone());
        builder.finish_chunks(chunk.clone());
        for to in &others {
            builder.send_chunks(*to, chunk.clone());
        }
    }
}
