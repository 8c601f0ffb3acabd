//! Fetches: content in the peer's memory that READs bring here.

use std::collections::{HashMap, VecDeque};

use foldhash::fast::RandomState;
use slab::Slab;

use crate::endpoint::fault::ConnectionFault;
use crate::endpoint::link::Link;
use crate::endpoint::messages::sender::Piece;
use tonic_rdma_verbs::RemoteSegment;
use tonic_rdma_verbs::internal::{Landed, Landing};

/// The fetches of one connection. They take turns, one READ at a time.
#[derive(Debug)]
pub(crate) struct Fetches {
    all: Slab<Fetch>,
    /// The keys of the fetches, by the handler's numbers.
    by_id: HashMap<u64, usize, RandomState>,
    /// Keys of the fetches with bytes that no READ was posted for.
    turns: VecDeque<u32>,
    /// READs that were posted and have not completed.
    outstanding: u32,
    /// Most READs at a time.
    most: u32,
    /// Longest READ.
    piece: u64,
    /// Bytes that may still be read at once, without a completion, before the thread does other work of the connection.
    at_once: u64,
    /// Most of these bytes.
    most_at_once: u64,
    /// Fetches that are over, with their memory unless they were cancelled.
    over: VecDeque<(u64, Option<Landed>)>,
}

/// One fetch.
#[derive(Debug)]
struct Fetch {
    /// The handler's number.
    id: u64,
    landing: Landing,
    /// Bytes of the peer, each with its offset in the content, that no READ was posted for; the next at the end.
    rest: Vec<(RemoteSegment, u64, usize)>,
    /// The handler does not want the content any more.
    cancelled: bool,
}

impl Fetches {
    /// Longest READ whose bytes a device, or the peer, brings beside the CPU of this end, and most of them at a time: together more than
    /// a fast network has under way.
    const BESIDE: (u64, u32) = (256 << 10, 8);
    /// The same where a READ is a copy, made when it is posted, which delays messages for as long.
    const BY_COPY: (u64, u32) = (128 << 10, 1);

    /// Makes an empty list, which posts at most `most` READs at a time.
    pub(crate) fn new(most: u32) -> Self {
        Self {
            all: Slab::new(),
            by_id: HashMap::default(),
            turns: VecDeque::new(),
            outstanding: 0,
            most,
            piece: 0,
            at_once: 0,
            most_at_once: 0,
            over: VecDeque::new(),
        }
    }

    /// Chooses the length and the number of READs, before the first fetch. `by_copy`: a READ is a copy by the thread that posts it.
    pub(crate) fn start(&mut self, by_copy: bool) {
        let (piece, most) = if by_copy { Self::BY_COPY } else { Self::BESIDE };
        self.piece = piece;
        self.most = self.most.min(most);
        self.most_at_once = if by_copy { piece } else { 0 };
    }

    /// Adds a fetch of `pieces` into `landing`, which has room for all of them.
    pub(crate) fn add(&mut self, id: u64, pieces: &[Piece<'_>], mut landing: Landing) {
        let mut rest = Vec::with_capacity(pieces.len());
        let mut at = 0;
        for piece in pieces {
            match piece {
                Piece::Inline(bytes) => {
                    // The landing was leased for all pieces, so they fit.
                    let _ = landing.copy_in(at, bytes);
                    at += bytes.len();
                }
                Piece::Remote { length: 0, .. } => {}
                Piece::Remote { from, length } => {
                    rest.push((*from, *length, at));
                    at += *length as usize;
                }
            }
        }
        rest.reverse();
        let fetch = Fetch { id, landing, rest, cancelled: false };
        let is_over = fetch.rest.is_empty();
        let key = self.all.insert(fetch);
        self.by_id.insert(id, key);
        match is_over {
            true => self.finish(key),
            false => self.turns.push_back(key as u32),
        }
    }

    /// Allows READs at once again. The connection calls this when it begins to carry on.
    pub(crate) fn renew(&mut self) {
        self.at_once = self.most_at_once;
    }

    /// Posts READs, as many as may be outstanding. Returns their number, and the bytes of those without a completion. Where a READ is a
    /// copy, short fetches, and the ends of long ones, are read at once, and are over when this returns.
    pub(crate) fn post(&mut self, link: &Link) -> Result<(u64, u64), ConnectionFault> {
        let (mut posted, before) = (0, self.at_once);
        while self.outstanding < self.most
            && let Some(key) = self.turns.pop_front()
        {
            let Some(fetch) = self.all.get_mut(key as usize) else { continue };
            posted += fetch.land(&mut self.at_once, link);
            if fetch.rest.is_empty() {
                if fetch.landing.reads() == 0 {
                    self.finish(key as usize);
                }
                continue;
            }
            let Some((from, length, at)) = fetch.rest.last_mut() else { continue };
            let now = (*length).min(self.piece);
            link.post_landing(&mut fetch.landing, key, *at..*at + now as usize, *from)?;
            from.address = from.address.wrapping_add(now);
            (*length, *at) = (*length - now, *at + now as usize);
            if *length == 0 {
                fetch.rest.pop();
            }
            if !fetch.rest.is_empty() {
                self.turns.push_back(key);
            }
            self.outstanding += 1;
            posted += 1;
        }
        Ok((posted, before - self.at_once))
    }

    /// Notes that a READ of the fetch `key` has completed with success.
    pub(crate) fn completed(&mut self, key: u32) {
        let Some(fetch) = self.all.get_mut(key as usize) else { return };
        fetch.landing.read_completed();
        self.outstanding = self.outstanding.saturating_sub(1);
        if fetch.landing.reads() == 0 && fetch.rest.is_empty() {
            self.finish(key as usize);
        }
    }

    /// Ends the fetch with the handler's number `id`, if it has not landed.
    pub(crate) fn cancel(&mut self, id: u64) {
        let Some(&key) = self.by_id.get(&id) else { return };
        let Some(fetch) = self.all.get_mut(key) else { return };
        fetch.cancelled = true;
        fetch.rest.clear();
        if fetch.landing.reads() == 0 {
            self.finish(key);
        }
    }

    /// Returns a fetch that is over, and its content unless it was cancelled.
    pub(crate) fn poll_over(&mut self) -> Option<(u64, Option<Landed>)> {
        self.over.pop_front()
    }

    /// Returns whether a fetch is over that [`poll_over`](Self::poll_over) has not returned.
    pub(crate) fn has_over(&self) -> bool {
        !self.over.is_empty()
    }

    /// Returns whether there is no fetch under way.
    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    fn finish(&mut self, key: usize) {
        let Fetch { id, landing, cancelled, .. } = self.all.remove(key);
        self.by_id.remove(&id);
        let landed = if cancelled { None } else { landing.finish().ok() };
        self.over.push_back((id, landed));
    }
}

impl Fetch {
    /// Reads the rest at once, if it has at most `most` bytes, which become fewer. Returns the number of READs.
    fn land(&mut self, most: &mut u64, link: &Link) -> u64 {
        let left = self.rest.iter().fold(0_u64, |sum, (_, length, _)| sum.saturating_add(*length));
        if left > *most {
            return 0;
        }
        let mut count = 0;
        while let Some(&(from, length, at)) = self.rest.last()
            && self.landing.read_at_once(&**link.queue_pair(), at..at + length as usize, from)
        {
            *most -= length;
            self.rest.pop();
            count += 1;
        }
        count
    }
}
