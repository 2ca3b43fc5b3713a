@echo off
rem Finds a Python and hands over to rocm_setup.py beside this file: all the logic is there.
rem CAROM_PYTHON names one by hand. Exit codes: docs/amd.md; 10 is "no Python".
setlocal
set "PYTHONUTF8=1"
set "PY=%CAROM_PYTHON%"
if not defined PY if defined VIRTUAL_ENV set "PY=%VIRTUAL_ENV%\Scripts\python.exe"
if not defined PY if exist "%~dp0..\..\..\..\python_embeded\python.exe" set "PY=%~dp0..\..\..\..\python_embeded\python.exe"
if not defined PY if exist "%~dp0..\..\..\venv\Scripts\python.exe" set "PY=%~dp0..\..\..\venv\Scripts\python.exe"
if not defined PY if exist "%~dp0..\..\..\.venv\Scripts\python.exe" set "PY=%~dp0..\..\..\.venv\Scripts\python.exe"
if not defined PY if exist "%~dp0..\..\venv\Scripts\python.exe" set "PY=%~dp0..\..\venv\Scripts\python.exe"
if not defined PY for %%X in (py.exe) do set "PY=%%~$PATH:X"
if not defined PY for %%X in (python.exe) do set "PY=%%~$PATH:X"
if not defined PY goto none
"%PY%" "%~dp0rocm_setup.py" %*
set "RC=%ERRORLEVEL%"
if "%RC%"=="9009" goto none
goto end
:none
echo No Python found. Name the one of ComfyUI or ai-toolkit: set CAROM_PYTHON=C:\path\to\python.exe
set "RC=10"
:end
rem Started by a double click there are no arguments, and the window would close at once.
if "%~1"=="" pause
exit /b %RC%
