//! The sockets between devices: asking for descriptors, and answering.
//!
//! A request is [`Request::LENGTH`] bytes, an answer a status byte, then numbers or a reason, with descriptors beside
//! it.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

use super::super::VerbsError;

/// Descriptors of one answer at most.
const DESCRIPTORS: usize = 6;
const ANSWER: usize = 256;
const GRANTED: u8 = 1;
const REFUSED: u8 = 0;

/// What one device asks of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) queue_pair: u32,
    pub(super) token: u64,
    /// The segment of the queue pair's domain that is wanted; 0 for the queue pair itself.
    pub(super) segment: u64,
}

impl Request {
    const LENGTH: usize = 20;

    fn encode(self) -> [u8; Self::LENGTH] {
        let mut bytes = [0; Self::LENGTH];
        bytes[..4].copy_from_slice(&self.queue_pair.to_le_bytes());
        bytes[4..12].copy_from_slice(&self.token.to_le_bytes());
        bytes[12..].copy_from_slice(&self.segment.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::LENGTH] = bytes.try_into().ok()?;
        let (mut queue_pair, mut token, mut segment) = ([0; 4], [0; 8], [0; 8]);
        queue_pair.copy_from_slice(&bytes[..4]);
        token.copy_from_slice(&bytes[4..12]);
        segment.copy_from_slice(&bytes[12..]);
        Some(Self {
            queue_pair: u32::from_le_bytes(queue_pair),
            token: u64::from_le_bytes(token),
            segment: u64::from_le_bytes(segment),
        })
    }
}

/// What was granted.
#[derive(Debug, Default)]
pub(super) struct Grant {
    pub(super) numbers: Vec<u64>,
    pub(super) descriptors: Vec<OwnedFd>,
}

/// Asks, and waits for the answer for as long as the socket's timeouts let it.
pub(super) fn ask(socket: BorrowedFd<'_>, request: Request) -> Result<Grant, VerbsError> {
    let failed =
        |error: rustix::io::Errno| VerbsError::Unreachable(format!("no answer from its process: {error}"));
    rustix::net::send(socket, &request.encode(), SendFlags::NOSIGNAL).map_err(failed)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; ANSWER];
    let received = rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    );
    let received = received.map_err(failed)?;
    let descriptors = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        })
        .flatten()
        .collect();
    match &bytes[..received.bytes] {
        [GRANTED, numbers @ ..] => {
            let (numbers, _) = numbers.as_chunks::<8>();
            let numbers = numbers.iter().map(|number| u64::from_le_bytes(*number)).collect();
            Ok(Grant { numbers, descriptors })
        }
        [REFUSED, reason @ ..] => Err(VerbsError::Unreachable(String::from_utf8_lossy(reason).into_owned())),
        [] => Err(VerbsError::Unreachable("its process closed the link".into())),
        _ => Err(VerbsError::Unreachable("its process answered nonsense".into())),
    }
}

/// What came in on a link.
#[derive(Debug)]
pub(super) enum Incoming {
    Request(Request),
    /// No link of ours would send this.
    Nonsense,
    Ended,
}

/// Takes one request off a link that is readable.
pub(super) fn receive(socket: BorrowedFd<'_>) -> Incoming {
    let mut bytes = [0; ANSWER];
    match rustix::net::recv(socket, &mut bytes[..], RecvFlags::DONTWAIT) {
        Ok((0, _)) | Err(_) => Incoming::Ended,
        Ok((count, _)) => {
            bytes.get(..count).and_then(Request::decode).map_or(Incoming::Nonsense, Incoming::Request)
        }
    }
}

/// Answers a request; false if the other side does not take answers.
pub(super) fn grant(socket: BorrowedFd<'_>, numbers: &[u64], descriptors: &[BorrowedFd<'_>]) -> bool {
    let mut bytes = vec![GRANTED];
    bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return false;
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, flags).is_ok()
}

/// Refuses a request; false if the other side does not take answers.
pub(super) fn refuse(socket: BorrowedFd<'_>, reason: &str) -> bool {
    let mut bytes = vec![REFUSED];
    bytes.extend(reason.bytes().take(ANSWER - 1));
    rustix::net::send(socket, &bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT).is_ok()
}
