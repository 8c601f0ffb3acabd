//! The samples: Fashion-MNIST, 70 000 pictures of clothes in 10 classes (Xiao, Rasul and Vollgraf, 2017, arXiv:1708.07747).

pub(crate) mod fortunes;
pub(crate) mod idx;
pub(crate) mod shards;

use std::path::Path;

use candle_core::{Device, Tensor};

use crate::failure::Failure;
use idx::Idx;

/// The folder into which Debian's package puts the files.
pub(crate) const FOLDER: &str = "/usr/share/datasets/fashion-mnist";

/// Width and height of a picture, in pixels.
pub(crate) const SIDE: usize = 28;

/// Number of classes.
pub(crate) const CLASSES: usize = 10;

/// Mean and standard deviation of all pixels of the training pictures, as shares of 255. Inputs are shifted and scaled by
/// them.
const MEAN: f32 = 0.286;
const DEVIATION: f32 = 0.353;

/// Pictures and their classes.
#[derive(Debug)]
pub(crate) struct Samples {
    pixels: Vec<u8>,
    classes: Vec<u8>,
}

/// Samples to train with, and others to test with.
#[derive(Debug)]
pub(crate) struct Data {
    pub(crate) train: Samples,
    pub(crate) test: Samples,
}

impl Data {
    /// Reads the files in `folder`.
    pub(crate) fn read(folder: &Path) -> Result<Self, Failure> {
        Ok(Self { train: Samples::read(folder, "train")?, test: Samples::read(folder, "t10k")? })
    }
}

impl Samples {
    fn read(folder: &Path, name: &str) -> Result<Self, Failure> {
        let file = |kind: &str, dimensions| {
            let path = folder.join(format!("{name}-{kind}-idx{dimensions}-ubyte.gz"));
            if !path.exists() {
                return Err(Failure::run(format!(
                    "{} is missing; training/prepare installs Debian's package dataset-fashion-mnist, and \
                     --data names another folder with its files",
                    path.display()
                )));
            }
            let wrong = |error| Failure::run(format!("can't use {}", path.display())).because(error);
            idx::read(&path, dimensions).map_err(wrong)
        };
        Self::new(file("images", 3)?, file("labels", 1)?).map_err(|reason| {
            Failure::run(format!("can't use the {name} files in {}: {reason}", folder.display()))
        })
    }

    fn new(pictures: Idx, classes: Idx) -> Result<Self, String> {
        if pictures.dimensions != [classes.elements.len(), SIDE, SIDE] || classes.elements.is_empty() {
            let (found, classes) = (pictures.dimensions, classes.elements.len());
            return Err(format!(
                "pictures of {SIDE} × {SIDE} pixels are expected, found {found:?} and {classes} classes"
            ));
        }
        if let Some(class) = classes.elements.iter().find(|class| usize::from(**class) >= CLASSES) {
            return Err(format!("there are classes 0 to {}, found class {class}", CLASSES - 1));
        }
        Ok(Self { pixels: pictures.elements, classes: classes.elements })
    }

    /// Returns the number of samples.
    pub(crate) fn len(&self) -> usize {
        self.classes.len()
    }

    /// Returns the pictures `which`, of shape (number, 1, [`SIDE`], [`SIDE`]), and their classes. Numbers that no sample has are
    /// left out.
    pub(crate) fn batch(&self, which: impl Iterator<Item = usize>) -> candle_core::Result<(Tensor, Tensor)> {
        let (mut pixels, mut classes) = (Vec::new(), Vec::new());
        for sample in which {
            let range = sample * SIDE * SIDE..(sample + 1) * SIDE * SIDE;
            if let (Some(picture), Some(class)) = (self.pixels.get(range), self.classes.get(sample)) {
                pixels.extend(picture.iter().map(|pixel| (f32::from(*pixel) / 255.0 - MEAN) / DEVIATION));
                classes.push(u32::from(*class));
            }
        }
        let number = classes.len();
        let pictures = Tensor::from_vec(pixels, (number, 1, SIDE, SIDE), &Device::Cpu)?;
        Ok((pictures, Tensor::from_vec(classes, number, &Device::Cpu)?))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Makes samples whose class shows in their pixels.
    pub(crate) fn samples(number: usize) -> Samples {
        let classes: Vec<u8> = (0..number).map(|sample| (sample % CLASSES) as u8).collect();
        let pixel =
            |class: u8, pixel: usize| if pixel % CLASSES == usize::from(class) { 255 } else { pixel as u8 };
        let pixels = classes.iter().flat_map(|class| (0..SIDE * SIDE).map(|at| pixel(*class, at))).collect();
        Samples { pixels, classes }
    }

    #[test]
    fn a_batch_has_the_asked_samples() {
        let samples = samples(20);
        let (pictures, classes) = samples.batch([13, 4, 99].into_iter()).unwrap();
        assert_eq!(pictures.dims(), [2, 1, SIDE, SIDE], "there is no sample 99");
        assert_eq!(classes.to_vec1::<u32>().unwrap(), [3, 4]);
        let pixels = pictures.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(pixels[3], (1.0 - MEAN) / DEVIATION);
        assert_eq!(pixels[0], (0.0 - MEAN) / DEVIATION);
    }

    #[test]
    fn files_that_do_not_fit_together_are_refused() {
        let pictures = |number, side: usize| Idx {
            dimensions: vec![number, side, side],
            elements: vec![0; number * side * side],
        };
        let classes = |classes: &[u8]| Idx { dimensions: vec![classes.len()], elements: classes.to_vec() };
        assert!(Samples::new(pictures(2, SIDE), classes(&[0, 9])).is_ok());
        for (pictures, classes, message) in [
            (pictures(2, SIDE), classes(&[0]), "1 classes"),
            (pictures(1, 20), classes(&[0]), "[1, 20, 20]"),
            (pictures(1, SIDE), classes(&[10]), "found class 10"),
            (pictures(0, SIDE), classes(&[]), "0 classes"),
        ] {
            let error = Samples::new(pictures, classes).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }

    #[test]
    fn a_missing_file_names_the_script_that_installs_it() {
        let folder = tempfile::tempdir().unwrap();
        let error = Data::read(folder.path()).unwrap_err().with_causes();
        assert!(error.contains("train-images-idx3-ubyte.gz is missing; training/prepare"), "{error}");
        std::fs::write(folder.path().join("train-images-idx3-ubyte.gz"), "no gzip").unwrap();
        let error = Data::read(folder.path()).unwrap_err().with_causes();
        assert!(error.contains("can't use") && error.contains("train-images"), "{error}");
    }
}
