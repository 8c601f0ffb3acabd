//! What a connection keeps in memory for its peer, in bytes with their bookkeeping, and the bounds of it.
//!
//! | what | counts | bound |
//! |---|---|---|
//! | parts of bodies that were not taken | [`cost_of`], [`offer_cost`] | [`parts`](Ledger::parts), an eighth of the limit |
//! | headers and trailers that were not taken, calls | [`headers_cost`] | [`headers`](Ledger::headers), a quarter |
//! | content that lands, or was not taken | its length | the limit |
//! | what this side queues and offers | its length | a half, beyond which senders wait |
//! | all of these, of all connections of the process | | [`HeldShare`] |
//!
//! The first two have a window each, which the peer keeps within (RFC 9113, 5.2): what the application takes,
//! and what is dropped, gives the peer credit again. A peer of version 3 knows no such windows. A call of it
//! that goes beyond the bound ends with RESOURCE_EXHAUSTED.
//!
//! Beyond its share of the process's budget a connection waits where it can: content stays at the peer, and
//! senders wait. A frame that the peer may send, because its windows allow that, ends its call with
//! RESOURCE_EXHAUSTED, unless the first two rows have little: what this side sends leaves the peer its frames.

use std::task::Waker;

use http::HeaderMap;

use super::stream::{OVERHEAD, OutHeaders, Receiving, Stream};
use crate::endpoint::HeldShare;
use crate::grpc::frame::{CallViolation, Kind, Limits};

/// The sums over all streams of a connection.
#[derive(Debug)]
pub(super) struct Ledger {
    /// The most that landed content may have, in bytes.
    limit: u64,
    /// The window of a stream before the application takes the first part, and the window after that.
    pub(super) first_window: i64,
    pub(super) full_window: i64,
    /// The peer knows windows of the connection.
    pub(super) has_windows: bool,
    /// Data, and where offered bytes lie.
    pub(super) parts: Window,
    /// Headers and trailers.
    pub(super) headers: Window,
    /// Bytes that are read from the peer's memory, until they are taken.
    landing: u64,
    /// Readers that wait until less lands.
    readers: Vec<Waker>,
    /// What calls that have begun queue, and what they offered and the peer has not given back.
    sent: usize,
    /// Senders wait until this side has less to send.
    has_senders: bool,
    share: HeldShare,
}

/// Whether content may land.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    Free,
    /// So much lands already. The reader is woken when something was taken.
    Full,
    /// The connections of the process hold so much that this one waits, and no event says when they hold less.
    Crowded,
}

/// A window of the connection, for both directions.
#[derive(Debug)]
pub(super) struct Window {
    /// The cost that the peer may have at this side.
    size: i64,
    /// The cost of what was not taken.
    pub(super) held: i64,
    /// The cost for which the peer is to get credit again.
    returned: i64,
    /// The cost that the peer takes now.
    credit: i64,
}

impl Window {
    fn new(size: i64) -> Self {
        Self { size, held: 0, returned: 0, credit: 0 }
    }

    /// Returns what the peer may still send. Its last frame may have cost more than there was.
    fn left(&self) -> i64 {
        self.size - self.held - self.returned
    }

    /// Returns whether this side may send a frame now.
    pub(super) fn has_credit(&self) -> bool {
        self.credit > 0
    }

    /// Notes that frames of this cost were sent.
    pub(super) fn spend(&mut self, cost: i64) {
        self.credit -= cost;
    }

    /// Adds credit of the peer.
    pub(super) fn add_credit(&mut self, credit: u64) -> Result<(), CallViolation> {
        add_credit(&mut self.credit, credit)
    }

    /// Returns whether the peer waits for credit, or will soon. More than a half of what is free is given
    /// back at a time, so small calls have no frames for it, and a peer that has nothing left gets all.
    fn is_due(&self) -> bool {
        self.returned > self.left().max(0)
    }
}

impl Ledger {
    /// The most bytes of a read whose content is not delivered in one segment.
    const PART: u64 = 512 << 10;
    /// The bookkeeping of a part that waits to be sent: an `OutPart`, in a queue that may be half full.
    pub(super) const QUEUED_PART: usize = 96;

    /// The most that a stream may be sent ahead before the application reads.
    const FIRST_WINDOW: i64 = 64 << 10;
    /// What this side may have to send, however much the process holds.
    const LITTLE: usize = 256 << 10;
    /// What frames of the peer may cost, however much the process holds: one stream whose reader stands still, at
    /// the default window, and some more calls.
    const OWN: i64 = HeldShare::OWN as i64 + (256 << 10);

    /// Makes a ledger with this limit in bytes, and streams with windows of at most `window` bytes.
    /// `has_windows`: the peer knows windows of the connection. `share`: the connection's, of what the process may
    /// hold.
    pub(super) fn new(limit: u64, window: usize, has_windows: bool, share: HeldShare) -> Self {
        let size = |bytes: u64| Window::new(bytes.clamp(1, u32::MAX.into()) as i64);
        // A peer without windows does not know when to stop. It has as much as before there were windows.
        let parts = size(if has_windows { limit / 8 } else { limit.saturating_mul(2) });
        // No stream takes all of the window.
        let full_window = i64::try_from(window).unwrap_or(i64::MAX).min((parts.size / 2).max(1));
        Self {
            limit,
            first_window: full_window.min(Self::FIRST_WINDOW),
            full_window,
            has_windows,
            parts,
            headers: size(limit / 4),
            landing: 0,
            readers: Vec::new(),
            sent: 0,
            has_senders: false,
            share,
        }
    }

    /// Returns the sizes of the windows, if the peer knows them.
    pub(super) fn windows(&self) -> Option<[u32; 2]> {
        // They fit.
        self.has_windows.then(|| [&self.parts, &self.headers].map(|window| window.size as u32))
    }

    /// Sets the windows of the peer. Without windows nothing has to wait.
    pub(super) fn set_peer(&mut self, limits: &Limits) {
        let [parts, headers] = limits.windows.map_or([i64::MAX; 2], |windows| windows.map(i64::from));
        (self.parts.credit, self.headers.credit) = (parts, headers);
    }

    /// Takes the credits that the peer is to get, for parts and for headers, if one is due.
    pub(super) fn take_credits(&mut self) -> Option<[u64; 2]> {
        if !self.is_due() {
            return None;
        }
        Some([&mut self.parts, &mut self.headers].map(|window| std::mem::take(&mut window.returned) as u64))
    }

    /// Returns whether a credit is due.
    pub(super) fn is_due(&self) -> bool {
        self.parts.is_due() || self.headers.is_due()
    }

    /// Adds what a frame of this kind makes this side hold. Returns the cost, or 0 if there is no room: the peer
    /// knows no windows, or the connections of the process hold too much.
    ///
    /// # Errors
    /// The peer had no credit for the frame.
    pub(super) fn add(&mut self, kind: Kind, cost: i64) -> Result<i64, CallViolation> {
        let has_windows = self.has_windows;
        let left = self.window_of(kind).left();
        if left <= 0 {
            return if has_windows { Err(CallViolation::ConnectionOverdrawn { kind, left }) } else { Ok(0) };
        }
        let is_own = self.parts.held + self.headers.held + cost <= Self::OWN;
        let is_held = self.share.hold(self.held() + cost as u64, is_own);
        self.window_of(kind).held += cost;
        if is_held {
            return Ok(cost);
        }
        // The frame is dropped, so the peer has credit for another.
        self.release(kind, cost);
        Ok(0)
    }

    /// Returns whether a peer without windows has no room for a frame of this kind, whatever the process holds.
    pub(super) fn is_full(&mut self, kind: Kind) -> bool {
        !self.has_windows && self.window_of(kind).left() <= 0
    }

    /// Returns all that the connection holds, in bytes.
    fn held(&self) -> u64 {
        (self.parts.held + self.headers.held) as u64 + self.landing + self.sent as u64
    }

    /// Charges the share with what the connection holds now.
    fn recharge(&mut self) {
        self.share.hold(self.held(), true);
    }

    /// Takes off what a frame of this kind cost, because it was taken or dropped.
    pub(super) fn release(&mut self, kind: Kind, cost: i64) {
        let has_windows = self.has_windows;
        let window = self.window_of(kind);
        window.held -= cost;
        window.returned += if has_windows { cost } else { 0 };
        self.recharge();
    }

    pub(super) fn window_of(&mut self, kind: Kind) -> &mut Window {
        if matches!(kind, Kind::Headers | Kind::Trailers) { &mut self.headers } else { &mut self.parts }
    }

    /// Begins the account of a stream.
    pub(super) fn open(&self, receiving: &mut Receiving) {
        (receiving.allowance, receiving.target) = (self.first_window, self.first_window);
    }

    /// Notes that the application took parts of a stream of this cost. Returns the credit that the peer is to
    /// get for the stream.
    pub(super) fn take(&self, stream: &mut Stream, cost: i64) -> Option<u64> {
        let receiving = &mut stream.receiving;
        receiving.unread -= cost;
        if receiving.ended || stream.closed {
            return None;
        }
        // This stream is being read, so its window becomes full-sized.
        receiving.target = self.full_window;
        let missing = receiving.target - receiving.allowance - receiving.unread;
        if missing < receiving.target / 2 {
            return None;
        }
        receiving.allowance += missing;
        Some(missing as u64)
    }

    /// Takes the headers and trailers of a stream off.
    pub(super) fn release_headers(&mut self, receiving: &mut Receiving) {
        let cost = std::mem::take(&mut receiving.headers_cost);
        self.release(Kind::Headers, cost);
    }

    /// Returns the most that a read has whose content is not delivered in one segment.
    pub(super) fn longest_part(&self) -> u64 {
        // So small that one lands whenever a reader waits for it.
        Self::PART.min(self.limit / 4).max(1)
    }

    /// Returns whether `length` more bytes may land for a stream, of which `held` bytes land or were not
    /// taken. One stream gets at most as much as it leaves to others, except that a stream that has nothing
    /// gets what is free. Streams that no reader waits for get one half of the limit, so that calls which are
    /// not read can't take all of it. `waker` is that of the reader, which is woken when something was taken. If
    /// nothing of the connection lands, a reader gets a part whatever the process holds.
    pub(super) fn land(&mut self, length: u64, held: u64, waker: Option<&Waker>) -> Room {
        let free = self.limit.saturating_sub(self.landing);
        let most = if held == 0 { free } else { free.saturating_sub(held) };
        let most = if waker.is_some() { most } else { most.min(free.saturating_sub(self.limit / 2)) };
        if length <= most {
            let must = self.landing == 0 && length <= self.longest_part() && waker.is_some();
            if !self.share.hold(self.held() + length, must) {
                return Room::Crowded;
            }
            self.lands(self.landing + length);
            return Room::Free;
        }
        if let Some(waker) = waker.filter(|waker| !self.readers.iter().any(|known| known.will_wake(waker))) {
            self.readers.push(waker.clone());
        }
        Room::Full
    }

    /// Notes how many bytes land, or were not taken.
    fn lands(&mut self, landing: u64) {
        self.landing = landing;
        self.share.lands(landing);
        self.recharge();
    }

    /// Notes that `length` bytes do not land, because their read was not started.
    pub(super) fn does_not_land(&mut self, length: u64) {
        self.lands(self.landing - length);
    }

    /// Notes that `length` bytes were taken, or are not read any more. Tasks to wake are added to `wakers`.
    pub(super) fn landed(&mut self, length: u64, wakers: &mut Vec<Waker>) {
        self.lands(self.landing - length);
        wakers.append(&mut self.readers);
    }

    /// Returns what a stream counts: what it queues, and what it offered and the peer has not given back. A
    /// call counts at most a half of the bound, so that one large message does not stop other calls. A request
    /// whose headers wait counts nothing, because it may wait for a call that has still to send.
    pub(super) fn sent_by(&self, stream: &Stream) -> usize {
        let sending = &stream.sending;
        let waits = stream.id == 0 || matches!(sending.headers, Some(OutHeaders::Request(_)));
        let counts = sending.bytes + sending.offered + Self::QUEUED_PART * sending.parts.len();
        if waits || stream.closed { 0 } else { counts.min(self.most_sent() / 2) }
    }

    /// Returns the bound of what this side queues and offers.
    fn most_sent(&self) -> usize {
        usize::try_from(self.limit / 2).unwrap_or(usize::MAX).max(1)
    }

    /// Notes that a stream counts `after` instead of `before`.
    pub(super) fn resend(&mut self, before: usize, after: usize) {
        if before != after {
            self.sent = self.sent - before + after;
            self.recharge();
        }
    }

    /// Returns whether senders have to wait.
    pub(super) fn has_much_to_send(&self) -> bool {
        self.sent >= self.most_sent() || self.is_crowded()
    }

    /// Returns whether senders have to wait because the connections of the process hold so much.
    fn is_crowded(&self) -> bool {
        self.sent > Self::LITTLE && self.share.is_over()
    }

    /// Returns whether senders wait only because other connections of the process hold so much, or held. What they
    /// hold may change at any time, so this does not look.
    pub(super) fn waits_for_others(&self) -> bool {
        self.has_senders && self.sent < self.most_sent() - self.most_sent() / 16
    }

    /// Returns whether the sender of a stream has to wait: until the peer takes some of the stream, or until
    /// [`wakes_senders`](Self::wakes_senders) says so.
    pub(super) fn stops_sender(&mut self, stream: &Stream) -> bool {
        let counts = self.sent_by(stream);
        if counts > 0 && counts >= self.most_sent() / 2 {
            return true;
        }
        self.has_senders |= self.has_much_to_send();
        self.has_much_to_send()
    }

    /// Returns whether calls may be opened although ended calls have offers that count `ended`.
    pub(super) fn opens_calls(&self, ended: usize) -> bool {
        ended < self.most_sent()
    }

    /// Returns whether senders wait that can go on. They wait until a part of the bound is free, because all of
    /// them are woken at once.
    pub(super) fn wakes_senders(&mut self) -> bool {
        let wakes = self.waits_for_others() && !self.is_crowded();
        self.has_senders &= !wakes;
        wakes
    }

    /// Takes off what lands and what is sent, because the connection has ended.
    pub(super) fn end(&mut self, wakers: &mut Vec<Waker>) {
        self.sent = 0;
        self.lands(0);
        wakers.append(&mut self.readers);
    }
}

/// The most credit of a stream or a connection.
const MOST_CREDIT: i64 = 1 << 50;

/// Adds credit of the peer to `sum`.
pub(super) fn add_credit(sum: &mut i64, credit: u64) -> Result<(), CallViolation> {
    let more = i64::try_from(credit).ok().and_then(|credit| sum.checked_add(credit));
    *sum = more.filter(|sum| *sum <= MOST_CREDIT).ok_or(CallViolation::Credit(credit))?;
    Ok(())
}

/// Returns the cost of data of `length` bytes.
pub(in crate::grpc) fn cost_of(length: usize) -> i64 {
    length as i64 + OVERHEAD
}

/// Returns what an OFFER of `segments` with a payload of `length` bytes costs the connection.
pub(super) fn offer_cost(length: usize, segments: usize) -> i64 {
    // A segment has 32 bytes, and a vector up to twice as many.
    cost_of(length + 64 * segments)
}

/// Returns the cost of headers or trailers that count `counted` bytes, and of their call.
pub(super) fn headers_cost(counted: usize, headers: &HeaderMap) -> i64 {
    (counted + 96 * headers.len() + 1024) as i64
}

#[cfg(test)]
mod for_tests {
    use super::*;

    impl Ledger {
        /// Takes another share, before anything is held.
        pub(in crate::grpc::core) fn set_share(&mut self, share: HeldShare) {
            self.share = share;
        }

        pub(in crate::grpc::core) fn all_held(&self) -> u64 {
            self.held()
        }

        /// Returns whether nothing is held for the peer.
        pub(in crate::grpc::core) fn is_empty(&self) -> bool {
            (self.parts.held, self.headers.held, self.landing, self.sent) == (0, 0, 0, 0)
        }

        /// Checks that each sum stays within its bound: beyond the windows is at most one frame, beyond what may
        /// be sent one part of `longest` bytes.
        pub(in crate::grpc::core) fn check(&self, frame: i64, longest: usize) {
            for window in [&self.parts, &self.headers] {
                assert!(window.held >= 0 && window.returned >= 0, "{self:?}");
                assert!(window.left() > -frame, "{self:?}");
            }
            assert!(self.landing <= self.limit && self.sent <= self.most_sent() + longest, "{self:?}");
        }

        /// Returns what this side may send, and what its peer may.
        pub(in crate::grpc::core) fn left(&self) -> [[i64; 2]; 2] {
            [&self.parts, &self.headers].map(|window| [window.credit, window.left()])
        }

        /// Returns whether the peer may send a frame of this kind.
        pub(in crate::grpc::core) fn has_room(&mut self, kind: Kind) -> bool {
            self.window_of(kind).left() > 0
        }

        pub(in crate::grpc::core) fn sent(&self) -> usize {
            self.sent
        }
    }
}
