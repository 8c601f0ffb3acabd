//! The content of librdmacm's events, and the data that the active end sends when it connects.

use std::ffi::c_int;
use std::ptr::NonNull;

use super::library::{Event, Id, event};

/// The data that the active end sends when it connects: the tokens of both queue pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Introduction {
    pub(super) target: u64,
    pub(super) source: u64,
}

impl Introduction {
    pub(super) const LENGTH: usize = 16;

    pub(super) fn to_bytes(self) -> [u8; Self::LENGTH] {
        let mut bytes = [0; Self::LENGTH];
        bytes[..8].copy_from_slice(&self.target.to_be_bytes());
        bytes[8..].copy_from_slice(&self.source.to_be_bytes());
        bytes
    }

    /// Parses the data of a peer, which may have padding.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let (target, rest) = bytes.split_first_chunk()?;
        let (source, _) = rest.split_first_chunk()?;
        Some(Self { target: u64::from_be_bytes(*target), source: u64::from_be_bytes(*source) })
    }
}

/// The content of an event.
pub(super) struct Note {
    pub(super) id: Option<NonNull<Id>>,
    pub(super) kind: u32,
    pub(super) status: c_int,
    pub(super) introduction: Option<Introduction>,
}

pub(super) fn note(event: NonNull<Event>) -> Note {
    // SAFETY: the event came from the library, and was not acknowledged yet.
    let event = unsafe { event.as_ref() };
    let data = event.parameters.private_data.cast::<u8>();
    let introduction = if event.kind == event::CONNECT_REQUEST && !data.is_null() {
        // SAFETY: the data of a request has the length that the event states.
        let bytes = unsafe { std::slice::from_raw_parts(data, event.parameters.private_data_length.into()) };
        Introduction::parse(bytes)
    } else {
        None
    };
    Note { id: NonNull::new(event.id), kind: event.kind, status: event.status, introduction }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_introduction_survives_the_round_trip() {
        let introduction = Introduction { target: 1, source: u64::MAX - 1 };
        let bytes = introduction.to_bytes();
        assert_eq!(Introduction::parse(&bytes), Some(introduction));
        assert_eq!(Introduction::parse(&[&bytes[..], &[0; 9]].concat()), Some(introduction));
        assert_eq!(Introduction::parse(&bytes[..15]), None);
    }
}
