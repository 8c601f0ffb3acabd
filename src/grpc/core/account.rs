//! What the streams of a connection keep in memory for the peer, and the bounds of that memory.

use super::stream::{OVERHEAD, Receiving, Stream};

/// The sums over all streams of what arrived and was not taken, each with its bound.
#[derive(Debug)]
pub(super) struct ReceiveAccount {
    /// The window of a stream before the application takes the first part, and the window after that.
    first_window: i64,
    full_window: i64,
    /// The cost of data that was not taken.
    unread_data: i64,
    most_unread_data: i64,
    /// The counted length of headers and trailers that the application may still hold.
    headers: usize,
    most_headers: usize,
    /// The sum of what full windows have beyond the first window.
    full_windows: i64,
    most_full_windows: i64,
}

impl ReceiveAccount {
    /// The number of full windows that there is always room for, however small the budget is.
    const FULL_WINDOWS: i64 = 8;
    /// The number of headers of the greatest length that there is always room for, however small the budget
    /// is.
    const LONG_HEADERS: usize = 64;

    /// Makes an account without bounds, for streams with these windows.
    pub(super) fn new(first_window: i64, full_window: i64) -> Self {
        Self {
            first_window,
            full_window,
            unread_data: 0,
            most_unread_data: i64::MAX,
            headers: 0,
            most_headers: usize::MAX,
            full_windows: 0,
            most_full_windows: i64::MAX,
        }
    }

    /// Sets the bounds by `budget`, in bytes: windows beyond the first ones may have as much, data that was
    /// not taken twice as much, and headers a quarter. `longest` is the most that the headers of one call
    /// count.
    pub(super) fn set_budget(&mut self, budget: u64, longest: usize) {
        let limit = i64::try_from(budget).unwrap_or(i64::MAX);
        self.most_full_windows = limit.max(self.full_window.saturating_mul(Self::FULL_WINDOWS));
        self.most_unread_data = limit.saturating_add(self.most_full_windows);
        let headers = usize::try_from(budget / 4).unwrap_or(usize::MAX);
        self.most_headers = headers.max(longest.saturating_mul(Self::LONG_HEADERS));
    }

    /// Returns the window of a stream that is read.
    pub(super) fn full_window(&self) -> i64 {
        self.full_window
    }

    /// Returns the cost of data that was not taken.
    pub(super) fn unread_data(&self) -> i64 {
        self.unread_data
    }

    /// Returns the counted length of headers and trailers.
    pub(super) fn headers(&self) -> usize {
        self.headers
    }

    /// Begins the account of a stream.
    pub(super) fn open(&self, receiving: &mut Receiving) {
        (receiving.allowance, receiving.target) = (self.first_window, self.first_window);
    }

    /// Returns whether headers that count `counted` bytes stay within the bound.
    pub(super) fn has_room_for_headers(&self, counted: usize) -> bool {
        self.headers.saturating_add(counted) <= self.most_headers
    }

    /// Adds headers that count `counted` bytes. Returns false, and adds nothing, beyond the bound.
    pub(super) fn add_headers(&mut self, receiving: &mut Receiving, counted: usize) -> bool {
        let has_room = self.has_room_for_headers(counted);
        if has_room {
            self.headers += counted;
            receiving.header_bytes += counted;
        }
        has_room
    }

    /// Takes the headers and trailers of a stream off, if none of them waits to be taken.
    pub(super) fn release_headers(&mut self, receiving: &mut Receiving) {
        if receiving.headers.is_none() && receiving.trailers.is_none() {
            self.headers -= std::mem::take(&mut receiving.header_bytes);
        }
    }

    /// Adds data of this cost. Returns false, and adds nothing, beyond the bound.
    pub(super) fn add_data(&mut self, receiving: &mut Receiving, cost: i64) -> bool {
        let has_room = self.unread_data + cost <= self.most_unread_data;
        if has_room {
            self.unread_data += cost;
            receiving.unread += cost;
        }
        has_room
    }

    /// Takes data of this cost off.
    pub(super) fn release_data(&mut self, cost: i64) {
        self.unread_data -= cost;
    }

    /// Notes that the application took parts of a stream of this cost. Returns the credit that the peer is to
    /// get.
    pub(super) fn take(&mut self, stream: &mut Stream, cost: i64) -> Option<u64> {
        let receiving = &mut stream.receiving;
        receiving.unread -= cost;
        if receiving.ended || stream.closed {
            return None;
        }
        // This stream is being read, so its window becomes full-sized. The number of full windows has a
        // limit, because the reader may stop later, and then all bytes of the window stay in memory.
        let more = self.full_window - receiving.target;
        if more > 0 && more <= self.most_full_windows - self.full_windows {
            self.full_windows += more;
            receiving.target = self.full_window;
        }
        let missing = receiving.target - receiving.allowance - receiving.unread;
        if missing < receiving.target / 2 {
            return None;
        }
        receiving.allowance += missing;
        Some(missing as u64)
    }

    /// Takes a stream off whose slot is free.
    pub(super) fn close(&mut self, receiving: &Receiving) {
        self.headers -= receiving.header_bytes;
        self.full_windows -= (receiving.target - self.first_window).max(0);
    }
}

/// Returns the cost of data of `length` bytes.
pub(super) fn cost_of(length: usize) -> i64 {
    length as i64 + OVERHEAD
}

#[cfg(test)]
mod for_tests {
    use super::*;

    impl ReceiveAccount {
        pub(in crate::grpc::core) fn most_unread_data(&mut self) -> &mut i64 {
            &mut self.most_unread_data
        }

        pub(in crate::grpc::core) fn most_headers(&mut self) -> &mut usize {
            &mut self.most_headers
        }

        pub(in crate::grpc::core) fn full_windows(&self) -> i64 {
            self.full_windows
        }
    }
}
