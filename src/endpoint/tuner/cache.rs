//! Calibrations on disk: a file for each device, in the user's cache directory.
//!
//! If the cache can't be used, the device is measured. Only files and directories of this user are read and written, and
//! links are not followed.

use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use super::calibration::Calibration;
use super::error::CacheError;
use super::format;
use super::key::CalibrationKey;

/// Returns the file for a key.
pub(super) fn file(directory: &Path, key: &CalibrationKey) -> PathBuf {
    let plain = |text: &str| -> String {
        let keep = |character: char| character.is_ascii_alphanumeric() || "_-".contains(character);
        text.chars().map(|character| if keep(character) { character } else { '_' }).collect()
    };
    let CalibrationKey { provider, device, slot_size, version, .. } = key;
    let build = if version.ends_with("debug") { "-debug" } else { "" };
    directory.join(format!("{}-{}-{slot_size}{build}", plain(provider), plain(device)))
}

/// Reads the calibration for a key; `None` if there is no file.
pub(super) fn load(directory: &Path, key: &CalibrationKey) -> Result<Option<Calibration>, CacheError> {
    let path = file(directory, key);
    match check_owner(directory) {
        Err(CacheError::Io { error, .. }) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        checked => checked?,
    }
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let file = match std::fs::OpenOptions::new().read(true).custom_flags(flags).open(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(at(&path))?,
    };
    let metadata = file.metadata().map_err(at(&path))?;
    if !metadata.is_file() || metadata.uid() != rustix::process::geteuid().as_raw() {
        return Err(CacheError::Foreign { path, problem: "it is no file of this user" });
    }
    let mut text = String::new();
    file.take(format::LONGEST).read_to_string(&mut text).map_err(at(&path))?;
    format::decode(&text, key).map(Some).map_err(|error| CacheError::Format { path, error })
}

/// Writes a calibration in place of an older one; returns the file.
pub(super) fn store(directory: &Path, calibration: &Calibration) -> Result<PathBuf, CacheError> {
    let path = file(directory, calibration.key());
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(at(directory))?;
    check_owner(directory)?;
    let fresh = path.with_extension(format!("{}-new", std::process::id()));
    let mut options = std::fs::OpenOptions::new();
    let mut file = options.write(true).create_new(true).mode(0o600).open(&fresh).map_err(at(&fresh))?;
    let renamed =
        file.write_all(format::encode(calibration).as_bytes()).and_then(|()| std::fs::rename(&fresh, &path));
    if renamed.is_err() {
        let _ = std::fs::remove_file(&fresh);
    }
    renamed.map_err(at(&path))?;
    Ok(path)
}

/// Checks that the directory is no link and belongs to this user.
fn check_owner(directory: &Path) -> Result<(), CacheError> {
    let metadata = directory.symlink_metadata().map_err(at(directory))?;
    let problem = if !metadata.is_dir() {
        "it is no directory (links are not followed)"
    } else if metadata.uid() != rustix::process::geteuid().as_raw() {
        "it belongs to another user"
    } else {
        return Ok(());
    };
    Err(CacheError::Foreign { path: directory.into(), problem })
}

/// Returns a function that adds `path` to an error of the system.
fn at(path: &Path) -> impl FnOnce(io::Error) -> CacheError {
    move |error| CacheError::Io { path: path.into(), error }
}

#[cfg(test)]
mod tests {
    use super::super::calibration::tests::sample;
    use super::*;

    /// A directory of one test, removed on drop.
    struct Place(PathBuf);

    impl Place {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("tonic-rdma-tune-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&path);
            Self(path)
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_calibration_is_stored_loaded_and_replaced() {
        let place = Place::new("stored");
        let directory = place.0.join("deep").join("down");
        let (first, second) = (sample(&[(1024, 1, 9)]), sample(&[(2048, 2, 9)]));
        assert_eq!(load(&directory, first.key()).unwrap(), None);
        let path = store(&directory, &first).unwrap();
        assert_eq!(load(&directory, first.key()).unwrap(), Some(first.clone()));
        assert_eq!(store(&directory, &second).unwrap(), path);
        assert_eq!(load(&directory, first.key()).unwrap(), Some(second));
        let left: Vec<_> =
            std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(left, [path], "nothing else is left behind");
    }

    #[test]
    fn a_damaged_file_is_reported_and_replaced() {
        let place = Place::new("damaged");
        let calibration = sample(&[(1024, 1, 9)]);
        let path = store(&place.0, &calibration).unwrap();
        for bytes in [&b"nonsense"[..], &[0xff; 100], &[b'x'; 1 << 20], b""] {
            std::fs::write(&path, bytes).unwrap();
            let error = load(&place.0, calibration.key()).unwrap_err().to_string();
            assert!(error.contains(path.to_str().unwrap()), "{error}");
        }
        store(&place.0, &calibration).unwrap();
        assert_eq!(load(&place.0, calibration.key()).unwrap(), Some(calibration));
    }

    #[test]
    fn links_and_files_in_place_of_directories_are_refused() {
        let place = Place::new("links");
        let calibration = sample(&[(1024, 1, 9)]);
        let (real, link, file) = (place.0.join("real"), place.0.join("link"), place.0.join("file"));
        let path = store(&real, &calibration).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        std::fs::write(&file, "").unwrap();
        for directory in [&link, &file] {
            store(directory, &calibration).unwrap_err();
            load(directory, calibration.key()).unwrap_err();
        }
        let copy = place.0.join("copy");
        std::fs::rename(&path, &copy).unwrap();
        std::os::unix::fs::symlink(&copy, &path).unwrap();
        load(&real, calibration.key()).unwrap_err();
        store(&place.0.join("file").join("below"), &calibration).unwrap_err();
    }

    #[test]
    fn a_device_of_any_name_has_a_file_in_the_directory() {
        let mut key = sample(&[]).key().clone();
        key.device = "../..//x\u{fc}".into();
        let path = file(Path::new("/cache"), &key);
        assert_eq!(path.parent(), Some(Path::new("/cache")));
        assert!(path.to_str().unwrap().is_ascii());
    }
}
