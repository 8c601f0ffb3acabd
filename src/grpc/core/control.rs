//! The short frames that the peer waits for, and whether the peers take new calls.

use std::collections::VecDeque;
use std::sync::Arc;

use super::output::Message;
use crate::grpc::frame::{CallViolation, FrameHeader, Kind, Limits, ResetCode};

/// Frames without content that wait to be sent.
#[derive(Debug, Default)]
pub(super) struct Control {
    settings_sent: bool,
    resets: VecDeque<(u32, ResetCode)>,
    credits: VecDeque<(u32, u64)>,
    /// Credit for the windows of the connection.
    window_credits: Option<[u64; 2]>,
    /// Offers of the peer whose memory is free.
    taken: VecDeque<u64>,
    /// TAKEN waits for a message that follows at once, which takes it along.
    keeps_taken: bool,
    go_away: GoAway,
    /// Something was queued that the peer waits for.
    urgent: bool,
}

/// Whether the peers take new calls.
#[derive(Debug, Default)]
struct GoAway {
    /// This side accepts no new calls after this stream.
    sent: Option<u32>,
    /// The reason, until the frame is sent.
    unsent: Option<Arc<str>>,
    /// The peer accepts no new calls after this stream, for this reason.
    received: Option<(u32, Arc<str>)>,
}

impl Control {
    /// The most bytes of the text of a GOAWAY.
    const REASON: usize = 120;

    pub(super) fn reset(&mut self, stream: u32, code: ResetCode) {
        self.resets.push_back((stream, code));
        self.urgent = true;
    }

    pub(super) fn credit(&mut self, stream: u32, credit: u64) {
        self.credits.push_back((stream, credit));
        self.urgent = true;
    }

    /// Gives credit for the windows of the connection.
    pub(super) fn window_credits(&mut self, credits: [u64; 2]) {
        let [parts, headers] = self.window_credits.unwrap_or_default();
        self.window_credits = Some([parts + credits[0], headers + credits[1]]);
    }

    /// Gives an offer back.
    pub(super) fn taken(&mut self, offer: u64) {
        self.taken.push_back(offer);
        self.urgent = true;
    }

    /// Lets TAKEN wait for a message that follows at once, or not.
    pub(super) fn keep_taken(&mut self, keeps: bool) {
        self.keeps_taken = keeps;
    }

    pub(super) fn set_urgent(&mut self) {
        self.urgent = true;
    }

    /// Returns whether something that the peer waits for was queued since the last call.
    pub(super) fn take_urgent(&mut self) -> bool {
        std::mem::take(&mut self.urgent)
    }

    /// Returns the number of answers to frames of the peer that wait.
    pub(super) fn answers(&self) -> usize {
        self.taken.len() + self.resets.len()
    }

    pub(super) fn has_resets(&self) -> bool {
        !self.resets.is_empty()
    }

    /// Returns whether a frame waits.
    pub(super) fn has_output(&self) -> bool {
        !self.settings_sent
            || self.answers() > 0
            || !self.credits.is_empty()
            || self.window_credits.is_some()
            || self.go_away.unsent.is_some()
    }

    /// Adds the limits of this side to the message, once.
    pub(super) fn write_settings(&mut self, limits: &Limits, message: &mut Message) {
        if !std::mem::replace(&mut self.settings_sent, true) {
            let payload = limits.encode();
            message.frame(&FrameHeader::new(Kind::Settings, 0, payload.len()), &payload);
        }
    }

    /// Adds all frames that wait to the message. Returns false if the message is full.
    pub(super) fn write(&mut self, message: &mut Message) -> bool {
        while let Some(&(stream, code)) = self.resets.front() {
            if message.left() < FrameHeader::LENGTH {
                return false;
            }
            let extra = code.to_wire();
            message.frame(&FrameHeader { extra, ..FrameHeader::new(Kind::Reset, stream, 0) }, &[]);
            self.resets.pop_front();
        }
        if !self.taken.is_empty() && !self.keeps_taken {
            let count = (message.payload_left() / 8).min(self.taken.len());
            if count == 0 {
                return false;
            }
            let ids = self.taken.drain(..count);
            message.frame_by(FrameHeader::new(Kind::Taken, 0, count * 8), |payload| {
                payload.extend(ids.flat_map(u64::to_le_bytes));
            });
        }
        while let Some(&(stream, credit)) = self.credits.front() {
            if message.payload_left() < 8 {
                return false;
            }
            message.frame(&FrameHeader::new(Kind::Credit, stream, 8), &credit.to_le_bytes());
            self.credits.pop_front();
        }
        if let Some(credits) = self.window_credits {
            if message.payload_left() < 16 {
                return false;
            }
            let payload = credits.map(u64::to_le_bytes);
            message.frame(&FrameHeader::new(Kind::Credit, 0, 16), payload.as_flattened());
            self.window_credits = None;
        }
        if let Some(reason) = &self.go_away.unsent {
            // A character that is cut in two is replaced by the reader.
            let text = &reason.as_bytes()[..reason.len().min(Self::REASON)];
            if message.payload_left() < text.len() {
                return false;
            }
            let last = self.go_away.sent.unwrap_or_default();
            message.frame(&FrameHeader::new(Kind::GoAway, last, text.len()), text);
            self.go_away.unsent = None;
        }
        true
    }

    /// Tells the peer that this side accepts no new calls after the stream `last`.
    pub(super) fn go_away(&mut self, last: u32, reason: &str) {
        if self.go_away.sent.is_none() {
            self.go_away.sent = Some(last);
            self.go_away.unsent = Some(reason.into());
        }
    }

    /// Notes that the peer accepts no new calls after the stream `last`. Returns the reason, unless the peer
    /// has said so before.
    pub(super) fn went_away(&mut self, last: u32, reason: &[u8]) -> Result<Option<Arc<str>>, CallViolation> {
        match self.go_away.received {
            Some((before, _)) if before < last => {
                return Err(CallViolation::GoAwayOrder { seen: last, before });
            }
            Some((before, _)) if before == last => return Ok(None),
            _ => {}
        }
        let reason: Arc<str> = String::from_utf8_lossy(reason).into();
        self.go_away.received = Some((last, Arc::clone(&reason)));
        Ok(Some(reason))
    }

    /// Returns whether this side accepts no new calls.
    pub(super) fn has_gone_away(&self) -> bool {
        self.go_away.sent.is_some()
    }

    /// Returns the reason why the peer accepts no new calls.
    pub(super) fn peer_went_away(&self) -> Option<&Arc<str>> {
        self.go_away.received.as_ref().map(|(_, reason)| reason)
    }

    /// Returns whether a GOAWAY was sent or has arrived, and the peer waits for nothing.
    pub(super) fn is_drained(&self) -> bool {
        (self.has_gone_away() || self.peer_went_away().is_some())
            && self.answers() == 0
            && self.go_away.unsent.is_none()
    }

    /// Drops the frames of streams, because the connection has ended.
    pub(super) fn end(&mut self) {
        self.resets.clear();
        self.credits.clear();
        self.window_credits = None;
        self.taken.clear();
    }
}

#[cfg(test)]
mod for_tests {
    use super::*;

    impl Control {
        pub(in crate::grpc) fn keeps_taken(&self) -> bool {
            self.keeps_taken
        }

        pub(in crate::grpc::core) fn resets(&mut self) -> &mut VecDeque<(u32, ResetCode)> {
            &mut self.resets
        }

        pub(in crate::grpc::core) fn offers_taken(&self) -> &VecDeque<u64> {
            &self.taken
        }
    }
}
