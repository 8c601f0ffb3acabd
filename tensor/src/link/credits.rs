//! Credits: how many messages each end may send. Both counts are absolute and wrap, so a count that is repeated or late does no
//! harm.

/// The credits of one queue pair.
#[derive(Debug)]
pub(crate) struct Credits {
    /// The number of receives that were ever posted here.
    posted: u32,
    /// The number of them that the peer knows of.
    reported: u32,
    window: u32,
    /// The number of messages that were ever sent.
    sent: u32,
    /// The number of receives that the peer has ever reported.
    peer_posted: u32,
}

impl Credits {
    /// The number of the peer's receives that are kept for frames with credits only.
    const RESERVE: u32 = 4;

    /// Makes the credits of an end that has posted `window` receives.
    pub(crate) fn new(window: u32) -> Self {
        Self { posted: window, reported: window, window, sent: 0, peer_posted: 0 }
    }

    /// Sets the number of receives that the peer begins with.
    pub(crate) fn set_peer_receives(&mut self, receives: u32) {
        self.peer_posted = receives;
    }

    /// Returns whether the peer has a receive for another message.
    pub(crate) fn may_send(&self) -> bool {
        let left = self.peer_posted.wrapping_sub(self.sent) as i32;
        left > Self::RESERVE as i32
    }

    /// Counts a message that was sent.
    pub(crate) fn sent(&mut self) {
        self.sent = self.sent.wrapping_add(1);
    }

    /// Notes how many receives the peer has ever posted.
    pub(crate) fn peer_granted(&mut self, posted: u32) {
        if posted.wrapping_sub(self.peer_posted) as i32 > 0 {
            self.peer_posted = posted;
        }
    }

    /// Counts a receive that was taken and posted again.
    pub(crate) fn reposted(&mut self) {
        self.posted = self.posted.wrapping_add(1);
    }

    /// Returns whether the peer needs a report of the receives.
    pub(crate) fn owes_credit(&self) -> bool {
        self.posted.wrapping_sub(self.reported) >= self.window / 2
    }

    /// Returns the count for a frame that goes now.
    pub(crate) fn granted(&mut self) -> u32 {
        self.reported = self.posted;
        self.posted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two ends that answer one another, over a wire that keeps what was sent.
    #[test]
    fn no_end_sends_more_than_there_are_receives_and_no_end_waits_for_ever() {
        let (mut here, mut there) = (Credits::new(16), Credits::new(16));
        here.set_peer_receives(16);
        there.set_peer_receives(16);
        for _ in 0..100_000 {
            let mut burst = 0;
            while here.may_send() {
                here.sent();
                burst += 1;
            }
            assert!((8..=16).contains(&burst), "{burst}");
            for _ in 0..burst {
                there.reposted();
            }
            assert!(there.owes_credit());
            here.peer_granted(there.granted());
            assert!(!there.owes_credit());
            there.sent();
        }
    }

    #[test]
    fn counts_wrap() {
        let mut credits = Credits::new(8);
        (credits.sent, credits.posted, credits.reported) = (u32::MAX - 1, u32::MAX, u32::MAX);
        credits.set_peer_receives(u32::MAX - 1);
        assert!(!credits.may_send());
        credits.peer_granted(10);
        assert!(credits.may_send());
        credits.peer_granted(u32::MAX);
        assert!(credits.may_send(), "an old count changes nothing");
        credits.reposted();
        assert_eq!(credits.granted(), 0);
    }
}
