//! Credits: how many messages the peer has receives for, and how many we have told it of. Both counts are absolute and
//! wrap, so that one that is told twice, or late, does no harm.

/// The credits of one queue pair.
#[derive(Debug)]
pub(crate) struct Credits {
    /// Receives posted here, ever.
    posted: u32,
    /// What the peer knows of them.
    told: u32,
    window: u32,
    /// Messages sent, ever.
    sent: u32,
    /// Receives that the peer has told us of, ever.
    peer_posted: u32,
}

impl Credits {
    /// Receives of the peer's that are kept for frames which carry nothing but credits.
    const RESERVE: u32 = 4;

    /// A credits whose end here has posted `window` receives.
    pub(crate) fn new(window: u32) -> Self {
        Self { posted: window, told: window, window, sent: 0, peer_posted: 0 }
    }

    /// The peer begins with as many.
    pub(crate) fn set_peer_receives(&mut self, receives: u32) {
        self.peer_posted = receives;
    }

    /// Whether the peer has a receive for another message.
    pub(crate) fn may_send(&self) -> bool {
        let left = self.peer_posted.wrapping_sub(self.sent) as i32;
        left > Self::RESERVE as i32
    }

    /// A message was sent.
    pub(crate) fn sent(&mut self) {
        self.sent = self.sent.wrapping_add(1);
    }

    /// The peer says how many receives it has posted, ever.
    pub(crate) fn peer_granted(&mut self, posted: u32) {
        if posted.wrapping_sub(self.peer_posted) as i32 > 0 {
            self.peer_posted = posted;
        }
    }

    /// A receive was taken and posted again.
    pub(crate) fn reposted(&mut self) {
        self.posted = self.posted.wrapping_add(1);
    }

    /// Whether the peer should be told how many there are.
    pub(crate) fn owes_credit(&self) -> bool {
        self.posted.wrapping_sub(self.told) >= self.window / 2
    }

    /// What a frame that goes now tells the peer.
    pub(crate) fn granted(&mut self) -> u32 {
        self.told = self.posted;
        self.posted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two creditss that answer one another, over a wire that holds what was sent.
    #[test]
    fn nobody_sends_more_than_there_are_receives_and_nobody_waits_for_ever() {
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
        (credits.sent, credits.posted, credits.told) = (u32::MAX - 1, u32::MAX, u32::MAX);
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
