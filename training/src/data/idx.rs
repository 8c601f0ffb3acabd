//! Files in the format idx of the MNIST database (<http://yann.lecun.com/exdb/mnist>, "The IDX file format"), compressed with gzip.
//!
//! ```text
//!   0, 0, type, number of dimensions      type 8: unsigned bytes
//!   each dimension                        32 bits, most significant byte first
//!   the elements                          the last dimension varies fastest
//! ```

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use flate2::read::MultiGzDecoder;

/// The code of unsigned bytes, the one type that the files of Fashion-MNIST have.
const UNSIGNED_BYTES: u8 = 8;

/// The largest number of elements that is read. The largest file of Fashion-MNIST has 47 million.
const MOST: usize = 1 << 30;

/// An array of bytes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Idx {
    pub(crate) dimensions: Vec<usize>,
    pub(crate) elements: Vec<u8>,
}

/// The reason why a file can't be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum IdxError {
    #[error("the file can't be read")]
    Read(#[from] io::Error),
    #[error("the file is not an idx file: it begins with the bytes {0:?}, an idx file with two zeros")]
    Magic([u8; 4]),
    #[error("the elements have the type {0}, and only unsigned bytes ({UNSIGNED_BYTES}) are supported")]
    Type(u8),
    #[error("the header has {found} dimensions, {wanted} are expected")]
    Dimensions { found: usize, wanted: usize },
    #[error("the header states {0:?} elements, more than this program reads ({MOST})")]
    Large(Vec<usize>),
    #[error("the file ends after {found} of {wanted} bytes of {part}")]
    Truncated { part: &'static str, found: usize, wanted: usize },
    #[error("the file has bytes after its last element")]
    Longer,
}

/// Reads a compressed file with `dimensions` dimensions.
pub(crate) fn read(path: &Path, dimensions: usize) -> Result<Idx, IdxError> {
    parse(MultiGzDecoder::new(File::open(path)?), dimensions)
}

/// Reads an array with `dimensions` dimensions.
fn parse(mut from: impl Read, dimensions: usize) -> Result<Idx, IdxError> {
    let magic = word(&take(&mut from, 4, "the header")?);
    let [first, second, kind, count] = magic.to_be_bytes();
    if (first, second) != (0, 0) {
        return Err(IdxError::Magic(magic.to_be_bytes()));
    }
    if kind != UNSIGNED_BYTES {
        return Err(IdxError::Type(kind));
    }
    if usize::from(count) != dimensions {
        return Err(IdxError::Dimensions { found: count.into(), wanted: dimensions });
    }
    let header = take(&mut from, 4 * dimensions, "the header")?;
    let dimensions: Vec<usize> = header.chunks(4).map(|bytes| word(bytes) as usize).collect();
    let length = dimensions.iter().try_fold(1_usize, |length, dimension| length.checked_mul(*dimension));
    let Some(length) = length.filter(|length| *length <= MOST) else {
        return Err(IdxError::Large(dimensions));
    };
    let elements = take(&mut from, length, "the elements")?;
    if from.read(&mut [0])? != 0 {
        return Err(IdxError::Longer);
    }
    Ok(Idx { dimensions, elements })
}

/// Returns a word whose most significant byte comes first.
fn word(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |word, byte| word << 8 | u32::from(*byte))
}

/// Reads exactly `wanted` bytes.
fn take(from: &mut impl Read, wanted: usize, part: &'static str) -> Result<Vec<u8>, IdxError> {
    let mut bytes = Vec::new();
    match from.take(wanted as u64).read_to_end(&mut bytes) {
        Ok(found) if found == wanted => Ok(bytes),
        Ok(found) => Err(IdxError::Truncated { part, found, wanted }),
        // A compressed file that is cut ends so.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            Err(IdxError::Truncated { part, found: bytes.len(), wanted })
        }
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    /// Two images of 2 × 3 pixels.
    fn sample() -> Vec<u8> {
        let mut bytes = vec![0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 3];
        bytes.extend(0..12);
        bytes
    }

    #[test]
    fn an_array_has_its_dimensions_and_elements() {
        let idx = parse(sample().as_slice(), 3).unwrap();
        assert_eq!(idx, Idx { dimensions: vec![2, 2, 3], elements: (0..12).collect() });
    }

    #[test]
    fn a_compressed_file_is_read_and_a_cut_one_is_refused() {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(&sample()).unwrap();
        let compressed = encoder.finish().unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &compressed).unwrap();
        assert_eq!(read(file.path(), 3).unwrap().dimensions, [2, 2, 3]);
        std::fs::write(file.path(), &compressed[..compressed.len() - 12]).unwrap();
        assert!(matches!(read(file.path(), 3), Err(IdxError::Truncated { .. })));
        std::fs::write(file.path(), sample()).unwrap();
        assert!(matches!(read(file.path(), 3), Err(IdxError::Read(_))), "not compressed");
    }

    #[test]
    fn each_prefix_of_a_file_is_truncated() {
        let whole = sample();
        for length in 0..whole.len() {
            let error = parse(&whole[..length], 3).unwrap_err();
            assert!(matches!(error, IdxError::Truncated { .. }), "{length} bytes: {error}");
        }
    }

    #[test]
    fn a_wrong_header_is_named() {
        let changed = |index: usize, byte: u8| {
            let mut bytes = sample();
            bytes[index] = byte;
            parse(bytes.as_slice(), 3).unwrap_err().to_string()
        };
        assert!(changed(0, 7).contains("[7, 0, 8, 3]"));
        assert!(changed(2, 13).contains("the type 13"));
        assert!(changed(3, 1).contains("1 dimensions, 3"));
        assert!(changed(7, 1).contains("after its last element"));
        assert!(changed(4, 255).contains("more than this program reads"));
    }
}
