//! Content in which every byte depends on a seed and on the position of the byte.

/// Content that depends on a seed and on the position in the stream, so that a check finds every byte that is
/// lost, doubled, moved or stale.
#[derive(Clone, Debug)]
pub struct Content {
    seed: u64,
    position: u64,
}

impl Content {
    /// Starts the stream of this seed.
    pub fn new(seed: u64) -> Self {
        Self { seed, position: 0 }
    }

    fn word(&self, number: u64) -> [u8; 8] {
        let word = number.wrapping_add(self.seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let word = (word ^ (word >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word.to_le_bytes()
    }

    /// Returns the next `length` bytes of the stream.
    pub fn take(&mut self, length: usize) -> Vec<u8> {
        let (start, end) = (self.position, self.position + length as u64);
        self.position = end;
        // Whole words, because a test makes and checks gigabytes.
        let mut bytes = Vec::with_capacity(length + 16);
        (start / 8..end.div_ceil(8)).for_each(|number| bytes.extend_from_slice(&self.word(number)));
        bytes.drain(..(start % 8) as usize);
        bytes.truncate(length);
        bytes
    }

    /// Checks that `bytes` come next.
    pub fn check(&mut self, bytes: &[u8]) {
        for piece in bytes.chunks(64 << 10) {
            let start = self.position;
            let expected = self.take(piece.len());
            if piece != expected {
                let (at, byte) = piece.iter().zip(&expected).enumerate().find(|(_, (a, b))| a != b).unwrap();
                panic!(
                    "wrong byte at {} of the stream: {} in place of {}",
                    start + at as u64,
                    byte.0,
                    byte.1
                );
            }
        }
    }

    /// Returns the number of bytes taken or checked so far.
    pub fn position(&self) -> u64 {
        self.position
    }
}

/// Draws a length from 0 to `most` whose magnitude is evenly spread.
pub fn random_length(random: &mut fastrand::Rng, most: usize) -> usize {
    let magnitude = 1_usize << random.u32(0..=usize::BITS - most.leading_zeros());
    random.usize(0..magnitude).min(most)
}

#[test]
fn content_does_not_depend_on_how_it_is_cut() {
    let whole = Content::new(5).take(100);
    let mut pieces = Content::new(5);
    let cut: Vec<u8> = [0, 1, 7, 8, 9, 3, 72].into_iter().flat_map(|length| pieces.take(length)).collect();
    assert_eq!(cut, whole);
    assert_eq!(pieces.position(), 100);
    let mut check = Content::new(5);
    check.check(&whole[..13]);
    check.check(&whole[13..]);
}

#[test]
#[should_panic(expected = "wrong byte at 70001 of the stream")]
fn a_wrong_byte_is_found() {
    let mut bytes = Content::new(5).take(80_000);
    bytes[70_001] ^= 1;
    Content::new(5).check(&bytes);
}

/// Returns the bytes as hexadecimal digits, 32 bytes in a line, each line after a line break.
pub fn hex(bytes: &[u8]) -> String {
    let digits = |line: &[u8]| line.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    bytes.chunks(32).map(|line| format!("\n{}", digits(line))).collect()
}

/// Returns the bytes of hexadecimal digits, between which there may be white space.
pub fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<_> = text.split_whitespace().collect();
    let pairs = digits.concat().into_bytes();
    pairs.chunks(2).map(|two| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap()).collect()
}
