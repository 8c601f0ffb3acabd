//! Decompresses single messages. tonic has compressed them in this process, so they can be trusted.

use std::io::Read as _;

use bytes::{BufMut as _, Bytes, BytesMut};
use flate2::read::GzDecoder;

use super::flags::{Flags, PREFIX, parse};

/// Returns `data` after decompression of the messages whose flag in `wanted` is false.
///
/// tonic's encoder puts whole messages into a frame, and the services that send some messages plain use gzip. Other data stay
/// unchanged, and the peer, which checks the flags, reports a failure.
pub(super) fn as_wanted(data: Bytes, wanted: &Flags) -> Bytes {
    let Some(messages) = messages(&data) else { return data };
    let mut result = BytesMut::with_capacity(data.len());
    for message in messages {
        let plain = wanted.next() == Some(false) && message.compressed;
        match plain.then(|| message.decompressed()).flatten() {
            Some(plain) => {
                result.put_u8(0);
                result.put_u32(plain.len() as u32);
                result.put_slice(&plain);
            }
            None => result.put_slice(message.all),
        }
    }
    result.freeze()
}

struct Message<'a> {
    compressed: bool,
    /// The message with its prefix.
    all: &'a [u8],
}

impl Message<'_> {
    fn decompressed(&self) -> Option<Vec<u8>> {
        let mut plain = Vec::new();
        GzDecoder::new(&self.all[PREFIX..]).read_to_end(&mut plain).ok()?;
        Some(plain)
    }
}

/// Returns the messages of `data`, or `None` if the last message is incomplete.
fn messages(mut data: &[u8]) -> Option<Vec<Message<'_>>> {
    let mut found = Vec::new();
    while let Some(prefix) = data.first_chunk() {
        let (compressed, length) = parse(*prefix);
        let (all, rest) = data.split_at_checked(PREFIX + length)?;
        found.push(Message { compressed, all });
        data = rest;
    }
    data.is_empty().then_some(found)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn message(compressed: bool, text: &[u8]) -> Vec<u8> {
        let mut body = text.to_vec();
        if compressed {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(text).unwrap();
            body = encoder.finish().unwrap();
        }
        let mut message = vec![u8::from(compressed)];
        message.extend((body.len() as u32).to_be_bytes());
        message.extend(body);
        message
    }

    #[test]
    fn unwanted_compression_is_removed() {
        let data =
            [message(true, b"one"), message(true, b"two"), message(false, b"three"), message(true, b"")];
        let expected =
            [message(true, b"one"), message(false, b"two"), message(false, b"three"), message(true, b"")];
        let result = as_wanted(data.concat().into(), &Flags::from([true, false, false]));
        assert_eq!(result, expected.concat());
    }

    #[test]
    fn other_data_stay_unchanged() {
        for data in [&[1, 0, 0][..], &[1, 0, 0, 0, 9, 1], &[1, 0, 0, 0, 1, 0]] {
            let data = Bytes::copy_from_slice(data);
            assert_eq!(as_wanted(data.clone(), &Flags::from([false])), data);
        }
    }
}
