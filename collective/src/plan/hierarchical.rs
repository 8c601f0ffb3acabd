//! Hierarchical: within each host, then across hosts, then within each host again. So each element leaves a
//! host once as a sum, and comes back once as a result, however many ranks the host has.
//!
//! Each range of elements has an *owner*, the rank at which it becomes final. On each other host one rank
//! *stands in* for the owner. The foreign elements of a host are divided among its ranks in equal shares.
//!
//! ```text
//!   hosts {0, 1} and {2, 3}, parts 0 to 3
//!
//!                     rank 0       rank 1       rank 2       rank 3
//!   within a host     2, 0 ← 1     3, 1 ← 0     0, 2 ← 3     1, 3 ← 2     sums of two ranks
//!   across hosts      0 ← 2        1 ← 3        2 ← 0        3 ← 1        sums of all: final at the owner
//!   across hosts      2 ← 2        3 ← 3        0 ← 0        1 ← 1        the owner sends to its stand-ins
//!   within a host     3, 1 ← 1     2, 0 ← 0     1, 3 ← 3     0, 2 ← 2
//! ```
//!
//! Each level is one round, in which a rank receives from every other rank of its host, or from one rank of
//! every other host. A receiver reads the elements, so it takes them at its own pace, and senders can't
//! overrun it. Of an all-reduce, each host owns as much as each other one, so that a host with many ranks
//! sends no more than one with few: 2(H−1)/H·K bytes. Reduce-scatter and all-gather have the parts of the
//! ranks.

use std::ops::Range;

use super::builder::Builder;
use super::step::part;

/// Which ranks stand for which elements, as far as one rank has to know.
struct Layout {
    /// The other ranks of this host, the next one first.
    neighbours: Vec<usize>,
    /// All elements, by the ranks of this host that stand for them. An owner stands for its own.
    here: Vec<Share>,
    /// The elements of this rank, by the ranks of other hosts that stand in for it. The next host comes first.
    stand_ins: Vec<Share>,
}

/// Elements of one owner for which one rank of a host stands.
struct Share {
    owner: usize,
    rank: usize,
    range: Range<usize>,
}

pub(super) fn all_reduce(builder: &mut Builder) {
    let hosts = builder.hosts.members(builder.ranks);
    let mut owned = Vec::new();
    for (index, ranks) in hosts.iter().enumerate() {
        let of_host = part(builder.elements, hosts.len(), index);
        for (index, rank) in ranks.iter().enumerate() {
            let part = part(of_host.len(), ranks.len(), index);
            owned.push((*rank, of_host.start + part.start..of_host.start + part.end));
        }
    }
    let layout = Layout::new(builder, hosts, &owned);
    layout.reduce_scatter(builder);
    layout.all_gather(builder);
}

pub(super) fn reduce_scatter(builder: &mut Builder) {
    Layout::of_parts(builder).reduce_scatter(builder);
}

pub(super) fn all_gather(builder: &mut Builder) {
    Layout::of_parts(builder).all_gather(builder);
}

/// Returns the parent and the children of this rank in a broadcast: from one rank of each host to one of other
/// hosts, and from these to the other ranks of their hosts. One chunk goes along a tree of hosts, several go
/// along a chain.
pub(super) fn broadcast(builder: &Builder, root: usize) -> (usize, Vec<usize>) {
    let mut hosts = builder.hosts.members(builder.ranks);
    let of_root = hosts.iter().position(|ranks| ranks.contains(&root)).unwrap_or(0);
    hosts.rotate_left(of_root);
    // The first rank of a host is the one that receives from another host.
    let first = |index: usize| if index == 0 { root } else { hosts[index][0] };
    let index = hosts.iter().position(|ranks| ranks.contains(&builder.rank)).unwrap_or(0);
    if first(index) != builder.rank {
        return (first(index), Vec::new());
    }
    let is_one_chunk = builder.chunks(0..builder.elements).count() <= 1;
    let (parent, children) =
        if is_one_chunk { super::tree(index, hosts.len()) } else { super::chain(index, hosts.len()) };
    let others = hosts[index].iter().copied().filter(|rank| *rank != builder.rank);
    (first(parent), children.into_iter().map(first).chain(others).collect())
}

impl Layout {
    /// Returns the layout in which each rank owns its part.
    fn of_parts(builder: &Builder) -> Self {
        let owned: Vec<_> = (0..builder.ranks).map(|rank| (rank, builder.part(rank))).collect();
        Self::new(builder, builder.hosts.members(builder.ranks), &owned)
    }

    /// Makes the layout of these owners, in the order of their elements.
    fn new(builder: &Builder, mut hosts: Vec<Vec<usize>>, owned: &[(usize, Range<usize>)]) -> Self {
        let me = builder.rank;
        let own = hosts.iter().position(|ranks| ranks.contains(&me)).unwrap_or(0);
        hosts.rotate_left(own);
        let mut neighbours = hosts[0].clone();
        let place = neighbours.iter().position(|rank| *rank == me).unwrap_or(0);
        neighbours.rotate_left(place);
        neighbours.remove(0);
        let foreign = hosts[1..].iter().flat_map(|ranks| shares(builder, ranks, owned));
        let stand_ins = foreign.filter(|share| share.owner == me).collect();
        Self { neighbours, here: shares(builder, &hosts[0], owned), stand_ins }
    }

    /// Returns the ranges for which a rank of this host stands, joined where they meet. Foreign ones come first,
    /// because they still go to other hosts.
    fn ranges(&self, rank: usize) -> Vec<Range<usize>> {
        let mut ranges: Vec<Range<usize>> = Vec::new();
        let own = self.here.iter().filter(|share| share.owner == rank);
        for share in self.foreign(rank).chain(own) {
            match ranges.last_mut() {
                Some(last) if last.end == share.range.start => last.end = share.range.end,
                _ => ranges.push(share.range.clone()),
            }
        }
        ranges
    }

    /// Returns the foreign elements for which a rank of this host stands.
    fn foreign(&self, rank: usize) -> impl Iterator<Item = &Share> {
        self.here.iter().filter(move |share| share.rank == rank && share.owner != rank)
    }

    fn reduce_scatter(&self, builder: &mut Builder) {
        for to in &self.neighbours {
            for range in self.ranges(*to) {
                builder.send_chunks(*to, range);
            }
        }
        for range in self.ranges(builder.rank) {
            builder.reduce_chunks(&self.neighbours, range);
        }
        for share in self.foreign(builder.rank) {
            builder.send_chunks(share.owner, share.range.clone());
        }
        for share in &self.stand_ins {
            builder.reduce_chunks(&[share.rank], share.range.clone());
        }
        let me = builder.rank;
        for share in self.here.iter().filter(|share| share.owner == me) {
            builder.finish_chunks(share.range.clone());
        }
    }

    fn all_gather(&self, builder: &mut Builder) {
        for share in &self.stand_ins {
            builder.send_chunks(share.rank, share.range.clone());
        }
        for share in self.foreign(builder.rank) {
            builder.receive_chunks(share.owner, share.range.clone());
        }
        for to in &self.neighbours {
            for range in self.ranges(builder.rank) {
                builder.send_chunks(*to, range);
            }
        }
        for from in &self.neighbours {
            for range in self.ranges(*from) {
                builder.receive_chunks(*from, range);
            }
        }
    }
}

/// Returns the elements by the ranks of one host that stand for them: an owner of this host for its own, and
/// each rank for an equal share of the foreign ones. `owned` are all owners, in the order of their elements.
fn shares(builder: &Builder, ranks: &[usize], owned: &[(usize, Range<usize>)]) -> Vec<Share> {
    let is_here = |owner: &usize| ranks.binary_search(owner).is_ok();
    // Where the elements of each foreign owner end, if only foreign ones are counted.
    let mut borders = Vec::new();
    let mut foreign = 0;
    for (_, range) in owned.iter().filter(|(owner, _)| !is_here(owner)) {
        foreign += range.len();
        borders.push(foreign);
    }
    // A share that ends near such a border ends there, so that no message has only some elements.
    let end = |index: usize| {
        let end = part(foreign, ranks.len(), index).end;
        let after = borders.partition_point(|border| *border < end);
        let near = borders[after.saturating_sub(1)..].iter().take(2).copied();
        near.filter(|border| border.abs_diff(end) < builder.ranks)
            .min_by_key(|border| border.abs_diff(end))
            .unwrap_or(end)
    };
    let mut ends = ranks.iter().enumerate().map(|(index, rank)| (*rank, end(index))).peekable();
    let (mut shares, mut counted) = (Vec::new(), 0);
    for (owner, range) in owned {
        if is_here(owner) {
            shares.push(Share { owner: *owner, rank: *owner, range: range.clone() });
            continue;
        }
        let mut start = range.start;
        while start < range.end {
            while ends.next_if(|(_, end)| *end <= counted).is_some() {}
            let Some((rank, until)) = ends.peek() else { break };
            let end = range.end.min(start + (until - counted));
            shares.push(Share { owner: *owner, rank: *rank, range: start..end });
            counted += end - start;
            start = end;
        }
    }
    shares
}
