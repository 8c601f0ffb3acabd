//! The samples: Fashion-MNIST, 70 000 pictures of clothes in 10 classes (Xiao, Rasul and Vollgraf, 2017,
//! arXiv:1708.07747), or texts. And which samples each process takes.

use std::fs::{self, File};
use std::io::Read as _;
use std::ops::Range;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use flate2::read::MultiGzDecoder;
use tonic_rdma_commands::{Context as _, Failure};
use xxhash_rust::xxh3::Xxh3;

use crate::array::{Array, Block, Error};

/// The folder into which Debian's package `dataset-fashion-mnist` puts its files.
pub(crate) const PICTURES_FOLDER: &str = "/usr/share/datasets/fashion-mnist";

/// Width and height of a picture, in pixels.
pub(crate) const SIDE: usize = 28;

/// Number of classes.
pub(crate) const CLASSES: usize = 10;

/// Mean and standard deviation of all pixels of the training pictures, as shares of 255. Inputs are shifted
/// and scaled by them.
const MEAN: f32 = 0.286;
const DEVIATION: f32 = 0.353;

/// The code of unsigned bytes in a file's header, the one type that the files of Fashion-MNIST have.
const UNSIGNED_BYTES: u8 = 8;

/// The largest number of bytes that is read of a file. The largest file of Fashion-MNIST has 47 million.
const MOST: u64 = 1 << 30;

/// What to do about processes with different samples.
pub(crate) const SAME_SAMPLES: &str = "give all hosts files with the same content (--data, --texts)";

/// Pictures and their classes, or texts as numbers of characters.
#[derive(Debug)]
pub(crate) enum Samples {
    Pictures { pixels: Vec<u8>, classes: Vec<u8> },
    Texts(Vec<Vec<u8>>),
}

/// Samples to train with, and others to test with.
#[derive(Debug)]
pub(crate) struct Data {
    pub(crate) train: Samples,
    pub(crate) test: Samples,
}

impl Data {
    /// Reads the pictures in `folder`.
    pub(crate) fn pictures(folder: &Path) -> Result<Self, Failure> {
        let read = |name| {
            let (pictures, classes) = (idx(folder, name, "images", 3)?, idx(folder, name, "labels", 1)?);
            Samples::pictures(pictures, classes)
                .context(format!("can't use the {name} files in {}", folder.display()))
        };
        Ok(Self { train: read("train")?, test: read("t10k")? })
    }

    /// Reads the texts in `folder`. Each is cut after `length` characters.
    pub(crate) fn texts(folder: &Path, length: usize) -> Result<Self, Failure> {
        let (train, test) = read_texts(folder, length)?;
        Ok(Self { train: Samples::Texts(train), test: Samples::Texts(test) })
    }

    /// Returns a hash of all samples.
    pub(crate) fn hash(&self) -> u64 {
        let mut hash = Xxh3::new();
        let mut add = |bytes: &[u8]| {
            hash.update(&(bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        for samples in [&self.train, &self.test] {
            match samples {
                Samples::Pictures { pixels, classes } => {
                    add(pixels);
                    add(classes);
                }
                Samples::Texts(texts) => texts.iter().for_each(|text| add(text)),
            }
        }
        hash.digest()
    }
}

impl Samples {
    fn pictures(
        (dimensions, pixels): (Vec<usize>, Vec<u8>),
        (_, classes): (Vec<usize>, Vec<u8>),
    ) -> Result<Self, String> {
        if dimensions != [classes.len(), SIDE, SIDE] || classes.is_empty() {
            return Err(format!(
                "pictures of {SIDE} × {SIDE} pixels are expected, found {dimensions:?} and {} classes",
                classes.len()
            ));
        }
        if let Some(class) = classes.iter().find(|class| usize::from(**class) >= CLASSES) {
            return Err(format!("there are classes 0 to {}, found class {class}", CLASSES - 1));
        }
        Ok(Self::Pictures { pixels, classes })
    }

    /// Returns the number of samples.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Pictures { classes, .. } => classes.len(),
            Self::Texts(texts) => texts.len(),
        }
    }

    /// Returns the samples `which`, and what is to be found out about them. Numbers that no sample has are
    /// left out.
    ///
    /// Pictures have the shape (number, 1, [`SIDE`], [`SIDE`]), and a class each. Texts are those of
    /// [`batch`].
    pub(crate) fn batch(&self, which: impl Iterator<Item = usize>) -> Result<(Array, Array), Error> {
        let (all_pixels, all_classes) = match self {
            Self::Pictures { pixels, classes } => (pixels, classes),
            Self::Texts(texts) => {
                let (seen, next) = batch_of_texts(which.filter_map(|sample| texts.get(sample)))?;
                return Ok((Array::Words(seen), Array::Words(next)));
            }
        };
        let (mut pixels, mut classes) = (Vec::new(), Vec::new());
        for sample in which {
            let range = sample * SIDE * SIDE..(sample + 1) * SIDE * SIDE;
            if let (Some(picture), Some(class)) = (all_pixels.get(range), all_classes.get(sample)) {
                pixels.extend(picture.iter().map(|pixel| (f32::from(*pixel) / 255.0 - MEAN) / DEVIATION));
                classes.push(u32::from(*class));
            }
        }
        let number = classes.len();
        let pictures = Tensor::from_vec(pixels, (number, 1, SIDE, SIDE), &Device::Cpu)?;
        Ok((Array::Tensor(pictures), Array::Tensor(Tensor::from_vec(classes, number, &Device::Cpu)?)))
    }
}

/// Reads a file in the format idx of the MNIST database (<http://yann.lecun.com/exdb/mnist>, "The IDX file
/// format"), compressed with gzip. Returns its dimensions and its elements.
fn idx(folder: &Path, name: &str, kind: &str, dimensions: usize) -> Result<(Vec<usize>, Vec<u8>), Failure> {
    let path = folder.join(format!("{name}-{kind}-idx{dimensions}-ubyte.gz"));
    if !path.exists() {
        return Err(Failure::run(format!(
            "{} is missing; training/prepare installs Debian's package dataset-fashion-mnist, and --data names another folder with its files",
            path.display()
        )));
    }
    let read = || -> Result<_, Error> {
        let mut bytes = Vec::new();
        MultiGzDecoder::new(File::open(&path)?).take(MOST).read_to_end(&mut bytes)?;
        Ok(parse_idx(&bytes, dimensions)?)
    };
    read().context(format!("can't use {}", path.display()))
}

/// ```text
///   0, 0, type, number of dimensions
///   each dimension                        32 bits, most significant byte first
///   the elements                          the last dimension varies fastest
/// ```
fn parse_idx(bytes: &[u8], dimensions: usize) -> Result<(Vec<usize>, Vec<u8>), String> {
    let Some((header, elements)) = bytes.split_at_checked(4 + 4 * dimensions) else {
        return Err(format!("the file ends after {} bytes of its header", bytes.len()));
    };
    let (magic, lengths) = header.split_at(4);
    if magic != [0, 0, UNSIGNED_BYTES, dimensions as u8] {
        return Err(format!(
            "the file begins with the bytes {magic:?}, and an idx file of unsigned bytes with {dimensions} dimensions with \
             [0, 0, {UNSIGNED_BYTES}, {dimensions}]"
        ));
    }
    let length = |bytes: &[u8]| bytes.iter().fold(0, |word, byte| word << 8 | usize::from(*byte));
    let lengths: Vec<usize> = lengths.chunks(4).map(length).collect();
    let stated = lengths.iter().try_fold(1_usize, |product, length| product.checked_mul(*length));
    if stated != Some(elements.len()) {
        return Err(format!("the header states {lengths:?} elements, and {} follow", elements.len()));
    }
    Ok((lengths, elements.to_vec()))
}

/// Puts the samples of an epoch in their order, into memory that is there: `order` has an element for each
/// sample. The order depends on the seed and the epoch alone, so all processes have the same.
pub(crate) fn reorder(order: &mut [u32], seed: u64, epoch: usize) {
    order.iter_mut().zip(0..).for_each(|(entry, sample)| *entry = sample);
    // The odd factor (2⁶⁴ divided by the golden ratio) keeps the seeds of the epochs apart.
    let seed = seed.wrapping_add((epoch as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    fastrand::Rng::with_seed(seed).shuffle(order);
}

/// Returns the part of `length` that belongs to a process. The lengths of two parts differ by one at most.
pub(crate) fn part(length: usize, processes: usize, process: usize) -> Range<usize> {
    let bound = |process: usize| process * (length / processes) + process.min(length % processes);
    bound(process)..bound(process + 1)
}

/// The folder into which Debian's package `fortunes` puts its sayings.
pub(crate) const TEXTS_FOLDER: &str = "/usr/share/games/fortunes";

/// The number of different characters: none (0), the printable ones of ASCII (1 to 95), and the end of a line
/// (96).
pub(crate) const CHARACTERS: usize = 97;

/// Every n-th saying is tested with, and not trained with.
const TESTED: usize = 20;

/// Sayings with fewer characters are left out.
const LEAST: usize = 8;

/// Sayings as numbers of characters.
type Sayings = Vec<Vec<u8>>;

/// Reads the sayings of the files in `folder`, which are separated by lines with a single `%`. Files whose
/// name has an extension are tables of the program fortune, or links. The sayings are returned as numbers of
/// characters, in the order of the files' names: those to train with, and those to test with. Each is cut
/// after `length` characters.
fn read_texts(folder: &Path, length: usize) -> Result<(Sayings, Sayings), Failure> {
    let missing = |what: &str| {
        format!(
            "{} {what}; training/prepare installs Debian's package fortunes, and --texts names another folder of such files",
            folder.display()
        )
    };
    let entries = fs::read_dir(folder).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let paths = entries.context(missing("can't be read"))?.into_iter().map(|entry| entry.path());
    let mut paths: Vec<PathBuf> = paths.filter(|path| path.extension().is_none() && path.is_file()).collect();
    paths.sort();
    let mut all = Vec::new();
    for path in paths {
        let bytes = fs::read(&path).context(format!("can't read {}", path.display()))?;
        all.extend(sayings(&bytes).iter().map(|saying| numbers(saying, length)));
    }
    all.retain(|text| text.len() >= LEAST.min(length));
    let (mut train, mut test) = (Vec::new(), Vec::new());
    for (number, text) in all.into_iter().enumerate() {
        if number % TESTED == 0 { test.push(text) } else { train.push(text) }
    }
    if train.is_empty() { Err(Failure::run(missing("has no sayings"))) } else { Ok((train, test)) }
}

/// Returns the characters that the network sees and those that it has to predict, for these texts: both of
/// shape (texts, the largest length). The network sees number 0 first, and each text is filled up with 0.
fn batch_of_texts<'a>(texts: impl Iterator<Item = &'a Vec<u8>>) -> Result<(Block<u32>, Block<u32>), Error> {
    let texts: Vec<&Vec<u8>> = texts.collect();
    let length = texts.iter().map(|text| text.len()).max().unwrap_or(0);
    let (mut seen, mut next) = (Vec::new(), Vec::new());
    for text in &texts {
        let padding = length - text.len();
        let before = text.iter().take(text.len().saturating_sub(1));
        seen.extend([0].iter().chain(before).map(|number| u32::from(*number)).take(text.len()));
        next.extend(text.iter().map(|number| u32::from(*number)));
        seen.extend(std::iter::repeat_n(0, padding));
        next.extend(std::iter::repeat_n(0, padding));
    }
    let dims = [texts.len(), length];
    Ok((Block::new(&dims, seen)?, Block::new(&dims, next)?))
}

/// Returns the sayings of a file, without the ends of their last lines.
fn sayings(bytes: &[u8]) -> Vec<Vec<u8>> {
    let lines: Vec<&[u8]> = bytes.split(|byte| *byte == b'\n').collect();
    let sayings = lines.split(|line| line.trim_ascii_end() == b"%").map(|lines| lines.join(&b'\n'));
    sayings.map(|saying| saying.trim_ascii_end().to_vec()).filter(|saying| !saying.is_empty()).collect()
}

/// Returns the numbers of the first characters. Other characters than those of ASCII count as a question
/// mark.
fn numbers(saying: &[u8], length: usize) -> Vec<u8> {
    let number = |byte: &u8| match byte {
        b'\n' => 96,
        b'\t' => 1,
        b' '..=b'~' => byte - b' ' + 1,
        _ => b'?' - b' ' + 1,
    };
    saying.iter().filter(|byte| **byte != b'\r').take(length).map(number).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    /// Makes samples whose class shows in their pixels.
    pub(crate) fn samples(number: usize) -> Samples {
        let classes: Vec<u8> = (0..number).map(|sample| (sample % CLASSES) as u8).collect();
        let pixel =
            |class: u8, pixel: usize| if pixel % CLASSES == usize::from(class) { 255 } else { pixel as u8 };
        let pixels = classes.iter().flat_map(|class| (0..SIDE * SIDE).map(|at| pixel(*class, at))).collect();
        Samples::Pictures { pixels, classes }
    }

    #[test]
    fn a_batch_has_the_asked_samples() {
        let samples = samples(20);
        let (pictures, classes) = samples.batch([13, 4, 99].into_iter()).unwrap();
        let (pictures, classes) = (pictures.into_tensor().unwrap(), classes.into_tensor().unwrap());
        assert_eq!(pictures.dims(), [2, 1, SIDE, SIDE], "there is no sample 99");
        assert_eq!(classes.to_vec1::<u32>().unwrap(), [3, 4]);
        let pixels = pictures.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(pixels[3], (1.0 - MEAN) / DEVIATION);
        assert_eq!(pixels[0], (0.0 - MEAN) / DEVIATION);
    }

    #[test]
    fn files_that_do_not_fit_together_are_refused() {
        let pictures = |number, side: usize| (vec![number, side, side], vec![0; number * side * side]);
        let classes = |classes: &[u8]| (vec![classes.len()], classes.to_vec());
        assert!(Samples::pictures(pictures(2, SIDE), classes(&[0, 9])).is_ok());
        for (pictures, classes, message) in [
            (pictures(2, SIDE), classes(&[0]), "1 classes"),
            (pictures(1, 20), classes(&[0]), "[1, 20, 20]"),
            (pictures(1, SIDE), classes(&[10]), "found class 10"),
            (pictures(0, SIDE), classes(&[]), "0 classes"),
        ] {
            let error = Samples::pictures(pictures, classes).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }

    #[test]
    fn a_missing_file_names_the_script_that_installs_it() {
        let folder = tempfile::tempdir().unwrap();
        let error = Data::pictures(folder.path()).unwrap_err().with_causes();
        assert!(error.contains("train-images-idx3-ubyte.gz is missing; training/prepare"), "{error}");
    }

    /// Two images of 2 × 3 pixels.
    fn sample() -> Vec<u8> {
        let mut bytes = vec![0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 3];
        bytes.extend(0..12);
        bytes
    }

    #[test]
    fn a_compressed_file_is_read_and_a_bad_one_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train-images-idx3-ubyte.gz");
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(&sample()).unwrap();
        let compressed = encoder.finish().unwrap();
        std::fs::write(&path, &compressed).unwrap();
        let read = || idx(folder.path(), "train", "images", 3);
        assert_eq!(read().unwrap(), (vec![2, 2, 3], (0..12).collect()));
        let [cut, plain] = [&compressed[..compressed.len() - 12], &sample()].map(|bytes| {
            std::fs::write(&path, bytes).unwrap();
            read().unwrap_err().with_causes()
        });
        assert!(cut.contains("can't use") && cut.contains("train-images"), "{cut}");
        assert!(plain.contains("can't use") && plain.contains("gzip"), "{plain}");
    }

    #[test]
    fn each_prefix_of_a_file_and_a_wrong_header_is_named() {
        let whole = sample();
        for length in 0..whole.len() {
            let error = parse_idx(&whole[..length], 3).unwrap_err();
            assert!(error.contains("of its header") || error.contains("follow"), "{length} bytes: {error}");
        }
        for (index, byte, message) in [
            (0, 7, "[7, 0, 8, 3], and an idx file of unsigned bytes with 3 dimensions"),
            (2, 13, "[0, 0, 13, 3]"),
            (3, 1, "[0, 0, 8, 1]"),
            (7, 1, "states [1, 2, 3] elements, and 12 follow"),
            (4, 255, "elements, and 12 follow"),
        ] {
            let mut bytes = sample();
            bytes[index] = byte;
            let error = parse_idx(&bytes, 3).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }

    #[test]
    fn an_epoch_has_each_sample_once_in_an_order_of_its_own() {
        let order = |seed, epoch| {
            let mut order = vec![0; 1000];
            reorder(&mut order, seed, epoch);
            order
        };
        let first = order(5, 0);
        assert_eq!(first, order(5, 0));
        for other in [order(5, 1), order(6, 0)] {
            assert_ne!(first, other);
            let mut sorted = other;
            sorted.sort_unstable();
            assert_eq!(sorted, (0..1000).collect::<Vec<u32>>());
        }
    }

    #[test]
    fn the_parts_of_all_processes_are_the_whole() {
        for length in 0..40 {
            for processes in 1..10 {
                let parts: Vec<_> = (0..processes).map(|process| part(length, processes, process)).collect();
                assert_eq!(
                    parts.iter().flat_map(Clone::clone).collect::<Vec<_>>(),
                    (0..length).collect::<Vec<_>>()
                );
                let (least, most) = (length / processes, length.div_ceil(processes));
                assert!(parts.iter().all(|part| (least..=most).contains(&part.len())), "{parts:?}");
            }
        }
    }

    /// Makes texts that repeat a few characters, of varying length.
    pub(crate) fn texts(number: usize, length: usize) -> Vec<Vec<u8>> {
        let text = |text: usize| {
            (0..LEAST + text % (length - LEAST + 1)).map(|at| 34 + ((at + text) % 3) as u8).collect()
        };
        (0..number).map(text).collect()
    }

    #[test]
    fn sayings_are_separated_by_lines_with_a_percent_sign() {
        let text = b"one\n%\ntwo %\nlines\n%\n\n%\n100%\n% no end\n";
        assert_eq!(sayings(text), [&b"one"[..], b"two %\nlines", b"100%\n% no end"]);
        assert_eq!(numbers("a~ \n\u{e9}".as_bytes(), 9), [66, 95, 1, 96, 32, 32]);
        assert_eq!(numbers(b"abc", 2), [66, 67]);
    }

    #[test]
    fn a_batch_sees_each_character_after_the_one_before() {
        let (seen, next) = batch_of_texts([vec![5, 6, 7], vec![8]].iter()).unwrap();
        assert_eq!((seen.dims(), next.dims()), (&[2, 3][..], &[2, 3][..]));
        assert_eq!(seen.values(), [0, 5, 6, 0, 0, 0]);
        assert_eq!(next.values(), [5, 6, 7, 8, 0, 0]);
    }

    #[test]
    fn a_folder_is_read_and_a_missing_one_names_the_package_and_the_script() {
        let folder = tempfile::tempdir().unwrap();
        let error = |folder: &Path| read_texts(folder, 9).unwrap_err().with_causes();
        for error in [error(folder.path()), error(Path::new("/missing/folder"))] {
            assert!(error.contains("training/prepare installs Debian's package fortunes"), "{error}");
        }
        std::fs::write(folder.path().join("short.dat"), "no text").unwrap();
        let text: String = (0..40).map(|number| format!("saying number {number}\n%\n")).collect();
        std::fs::write(folder.path().join("short"), text).unwrap();
        let (train, test) = read_texts(folder.path(), 9).unwrap();
        assert_eq!((train.len(), test.len()), (38, 2));
        assert!(train.iter().all(|text| text.len() == 9));
    }
}
