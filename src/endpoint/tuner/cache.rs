//! Calibrations on disk: a file for each device, in the user's cache directory.
//!
//! A cache is a convenience: whatever is wrong with it, the device is measured anew. It is read and written by this user
//! alone: a directory that is a link or belongs to somebody else is left alone, and so is a file.

use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use super::calibration::Calibration;
use super::format;
use super::key::CalibrationKey;

/// The file of a key.
pub(super) fn file(directory: &Path, key: &CalibrationKey) -> PathBuf {
    let plain = |text: &str| -> String {
        let keep = |character: char| character.is_ascii_alphanumeric() || "_-".contains(character);
        text.chars().map(|character| if keep(character) { character } else { '_' }).collect()
    };
    let CalibrationKey { provider, device, slot_size, version, .. } = key;
    let build = if version.ends_with("debug") { "-debug" } else { "" };
    directory.join(format!("{}-{}-{slot_size}{build}", plain(provider), plain(device)))
}

/// Reads the calibration of a key; `None` if there is none, the error says why one can't be used.
pub(super) fn load(directory: &Path, key: &CalibrationKey) -> Result<Option<Calibration>, String> {
    let path = file(directory, key);
    let failed = |what: &dyn std::fmt::Display| format!("{}: {what}", path.display());
    match directory.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(&error)),
        Ok(_) => ours(directory).map_err(|reason| failed(&reason))?,
    }
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let file = match std::fs::OpenOptions::new().read(true).custom_flags(flags).open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(&error)),
    };
    let metadata = file.metadata().map_err(|error| failed(&error))?;
    if !metadata.is_file() || metadata.uid() != rustix::process::geteuid().as_raw() {
        return Err(failed(&"no file of this user's"));
    }
    let mut text = String::new();
    file.take(format::LONGEST).read_to_string(&mut text).map_err(|error| failed(&error))?;
    format::decode(&text, key).map(Some).map_err(|error| failed(&error))
}

/// Writes a calibration, in place of what there was; where, or why not.
pub(super) fn store(directory: &Path, calibration: &Calibration) -> Result<PathBuf, String> {
    let path = file(directory, calibration.key());
    let fresh = path.with_extension(format!("{}-new", std::process::id()));
    let written = make(directory).and_then(|()| {
        let mut options = std::fs::OpenOptions::new();
        let mut file = options.write(true).create_new(true).mode(0o600).open(&fresh)?;
        let renamed = file
            .write_all(format::encode(calibration).as_bytes())
            .and_then(|()| std::fs::rename(&fresh, &path));
        if renamed.is_err() {
            let _ = std::fs::remove_file(&fresh);
        }
        renamed
    });
    written.map(|()| path).map_err(|error| format!("{}: {error}", directory.display()))
}

fn make(directory: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    ours(directory).map_err(io::Error::other)
}

/// Checks that the directory is no link and this user's.
fn ours(directory: &Path) -> Result<(), &'static str> {
    let metadata = directory.symlink_metadata().map_err(|_| "it can't be looked at")?;
    if !metadata.is_dir() {
        return Err("it is no directory (links are not followed)");
    }
    if metadata.uid() != rustix::process::geteuid().as_raw() {
        return Err("it belongs to another user");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::calibration::tests::sample;
    use super::*;

    /// A directory of this test's own, gone with it.
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
    fn what_is_stored_is_loaded_and_replaced() {
        let place = Place::new("stored");
        let directory = place.0.join("deep").join("down");
        let (first, second) = (sample(&[(1024, 1, 9)]), sample(&[(2048, 2, 9)]));
        assert_eq!(load(&directory, first.key()), Ok(None));
        let path = store(&directory, &first).unwrap();
        assert_eq!(load(&directory, first.key()), Ok(Some(first.clone())));
        assert_eq!(store(&directory, &second), Ok(path.clone()));
        assert_eq!(load(&directory, first.key()), Ok(Some(second)));
        let left: Vec<_> =
            std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(left, [path], "nothing else is left behind");
    }

    #[test]
    fn a_damaged_file_is_told_and_replaced() {
        let place = Place::new("damaged");
        let calibration = sample(&[(1024, 1, 9)]);
        let path = store(&place.0, &calibration).unwrap();
        for bytes in [&b"nonsense"[..], &[0xff; 100], &[b'x'; 1 << 20], b""] {
            std::fs::write(&path, bytes).unwrap();
            let error = load(&place.0, calibration.key()).unwrap_err();
            assert!(error.contains(path.to_str().unwrap()), "{error}");
        }
        store(&place.0, &calibration).unwrap();
        assert_eq!(load(&place.0, calibration.key()), Ok(Some(calibration)));
    }

    #[test]
    fn links_and_what_is_no_directory_are_left_alone() {
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
