//! The store beyond the node that settings name.

use kvhoist::{Config, Error};

/// Opens the store that the setting `remote` names, if it names one and no program has given another. A build without
/// the cargo feature `remote` leaves that to the cache, which refuses the setting.
///
/// # Errors
/// [`Error::Config`]: what is wrong with the URL. It holds no credential.
pub fn open_remote(config: Config) -> Result<Config, Error> {
    opened(config).map_err(|(error, _)| error)
}

/// As [`open_remote`]. An error says with it whether the machine may have later what is missing.
pub(crate) fn opened(config: Config) -> Result<Config, (Error, bool)> {
    #[cfg(feature = "remote")]
    if let (Some(url), None) = (&config.remote.url, &config.remote.store) {
        let wrong = |kvhoist_remote::OpenError { what, found, expected, may_pass }| {
            (Error::Config { field: "remote", found: format!("{what}: {found}"), expected }, may_pass)
        };
        let store = kvhoist_remote::open(url).map_err(wrong)?;
        return Ok(config.remote_store(store));
    }
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_setting_makes_a_store_or_says_what_is_wrong() {
        assert_eq!(open_remote(Config::default()).expect("no remote tier"), Config::default());
        let opened = open_remote(Config::default().remote("redis://127.0.0.1:1/0".to_owned()));
        let wrong = open_remote(Config::default().remote("ftp://host/".to_owned()));
        if cfg!(feature = "remote") {
            let config = opened.expect("nothing is asked of it yet");
            assert!(config.remote.store.is_some() && config.validate().is_ok());
            assert!(matches!(wrong, Err(Error::Config { field: "remote", .. })), "{wrong:?}");
        } else {
            assert!(opened.expect("left to the cache").validate().is_err());
        }
    }
}
